"""The least new prefill beside the fewest others."""

from schedloom.policies.prefill_cost.policy import PrefillCost

__all__ = ["PrefillCost"]
