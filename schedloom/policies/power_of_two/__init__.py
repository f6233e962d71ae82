"""The better of two."""

from schedloom.policies.power_of_two.policy import PowerOfTwo

__all__ = ["PowerOfTwo"]
