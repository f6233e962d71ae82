"""Prefillers that pull what a session's Decoder kept."""

from schedloom.policies.pull_back.policy import PullBackRouting

__all__ = ["PullBackRouting"]
