"""Prefill and decode in separate batches."""

from schedloom.policies.phase_separation.policy import PhaseSeparation

__all__ = ["PhaseSeparation"]
