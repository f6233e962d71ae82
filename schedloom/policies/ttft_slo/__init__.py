"""Engines that answer in time."""

from schedloom.policies.ttft_slo.policy import TtftSlo

__all__ = ["TtftSlo"]
