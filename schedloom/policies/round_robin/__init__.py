"""Each engine in turn."""

from schedloom.policies.round_robin.policy import RoundRobin

__all__ = ["RoundRobin"]
