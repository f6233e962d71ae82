"""T1: policies on a scheduler of pure Python, a small model of an engine, for which nothing has to be installed."""

from schedloom.conformance.pure.trial import Model, Only, examine, hunt

__all__ = ["Model", "Only", "examine", "hunt"]
