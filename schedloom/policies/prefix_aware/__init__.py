"""The engine that saw the prompt's beginning."""

from schedloom.policies.prefix_aware.policy import PrefixAware

__all__ = ["PrefixAware"]
