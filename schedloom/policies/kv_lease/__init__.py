"""Leases on the KV of finished turns."""

from schedloom.policies.kv_lease.policy import KVLease

__all__ = ["KVLease"]
