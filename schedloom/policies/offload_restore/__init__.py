"""Recovery of preempted requests from host memory."""

from schedloom.policies.offload_restore.policy import OffloadRestore

__all__ = ["OffloadRestore"]
