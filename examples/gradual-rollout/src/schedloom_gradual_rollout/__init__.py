"""Let only a share of requests use append-prefill."""

from schedloom_gradual_rollout.policy import GradualRollout

__all__ = ["GradualRollout"]
