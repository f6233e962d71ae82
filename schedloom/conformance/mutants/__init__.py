"""Known-bad subjects: each breaks one promise, and the suite must say which.

A mutant is a mix-in that stands before the laboratory's scheduler or runner, or a policy. It is written against names
of the engine that the laboratory drives, and imports nothing of it.
"""

from __future__ import annotations

from schedloom.conformance.mutants.catalogue import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant"]
