"""Scheduling policies for disaggregated LLM serving, composed by configuration.

A policy author needs four names from here: ``Policy`` and ``PolicySettings`` (the bases of every policy and of its
settings), ``hookimpl`` (marks a method as the implementation of an extension point) and ``core`` for the types that
the hooks receive and return.
"""

from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, PolicySettings

__all__ = ["Policy", "PolicySettings", "__version__", "hookimpl"]

__version__ = "0.1.0"
