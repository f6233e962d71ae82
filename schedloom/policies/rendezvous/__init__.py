"""Engines for a session that every router would choose alike."""

from schedloom.policies.rendezvous.policy import Rendezvous

__all__ = ["Rendezvous"]
