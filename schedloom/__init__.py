"""Scheduling policies for disaggregated LLM serving, composed by configuration.

A policy author needs three names from here: ``Policy`` (the base of every policy), ``hookimpl`` (marks a method as
the implementation of an extension point) and ``core`` for the types that the hooks receive and return.
"""

from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy

__all__ = ["Policy", "__version__", "hookimpl"]

__version__ = "0.1.0"
