"""Scheduling policies for disaggregated LLM serving, composed by configuration.

A policy author needs four names from here: ``Policy`` and ``PolicySettings`` (the bases of every policy and of its
settings), ``hookimpl`` (marks a method as the implementation of an extension point) and ``core`` for the types that
the hooks receive and return.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedloom.core.hookspecs import hookimpl
    from schedloom.core.policy import Policy, PolicySettings

__all__ = ["Policy", "PolicySettings", "__version__", "hookimpl"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Loaded when it is asked for: a command has to heed signals before that, which takes a third of a second."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from schedloom.core import hookspecs, policy

    names = {"hookimpl": hookspecs.hookimpl, "Policy": policy.Policy, "PolicySettings": policy.PolicySettings}
    return names[name]
