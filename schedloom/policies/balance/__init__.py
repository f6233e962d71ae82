"""Admission in step with data-parallel peers."""

from schedloom.policies.balance.policy import Balance

__all__ = ["Balance"]
