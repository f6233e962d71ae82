"""The simulation that the conformance suite plays too."""

from schedloom.router.laboratory.clock import simulate
from schedloom.router.laboratory.engines import LEASE, WORDS, Faults, SimulatedResponse
from schedloom.router.laboratory.town import CONTINUATIONS, HANDOFF, Town, Turn

__all__ = ["CONTINUATIONS", "HANDOFF", "LEASE", "WORDS", "Faults", "SimulatedResponse", "Town", "Turn", "simulate"]
