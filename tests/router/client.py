"""The client that the conformance suite's simulation has too."""

from schedloom.router.laboratory.client import Client, Received

__all__ = ["Client", "Received"]
