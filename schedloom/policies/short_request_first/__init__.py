"""Short requests before long ones."""

from schedloom.policies.short_request_first.policy import ShortRequestFirst

__all__ = ["ShortRequestFirst"]
