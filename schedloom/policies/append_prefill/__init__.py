"""Decoder append-prefill, engine side."""

from schedloom.policies.append_prefill.policy import AppendPrefill

__all__ = ["AppendPrefill"]
