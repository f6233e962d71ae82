"""Decoder append-prefill, router side."""

from schedloom.policies.session_owner.policy import SessionOwnerRouting

__all__ = ["SessionOwnerRouting"]
