"""Decode latency stays inside a bound while prefill shares the Decoder's steps."""

from schedloom.policies.tpot_guard.policy import TpotGuard

__all__ = ["TpotGuard"]
