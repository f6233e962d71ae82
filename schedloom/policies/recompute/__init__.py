"""Recovery of preempted requests elsewhere."""

from schedloom.policies.recompute.policy import Recompute

__all__ = ["Recompute"]
