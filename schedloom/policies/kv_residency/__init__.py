"""Go by the KV that engines say they hold."""

from schedloom.policies.kv_residency.policy import KvResidency

__all__ = ["KvResidency"]
