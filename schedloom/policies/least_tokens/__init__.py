"""The least work under way."""

from schedloom.policies.least_tokens.policy import LeastTokens

__all__ = ["LeastTokens"]
