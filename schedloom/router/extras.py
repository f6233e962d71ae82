"""Packages that only some settings of the router need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module

from schedloom.core.policy import Policy
from schedloom.router.settings import RouterSettings


def missing(settings: RouterSettings, policies: Sequence[Policy]) -> Iterator[str]:
    """A sentence for each extra that a start would need and that is not installed here."""
    listening = [policy.name for policy in policies if policy.listens]
    wanted = (
        (settings.session_store is not None, "session_store", "sessions", ("redis.asyncio",)),
        (bool(listening), f"policy {', '.join(listening)}", "kv-events", ("zmq", "msgspec")),
    )
    for needed, what, extra, modules in wanted:
        if needed and not all(map(_is_here, modules)):
            yield (
                f"not installed here: what {what} needs where the router runs; "
                f"run pip install '/path/to/schedloom[{extra}]' (a checkout) there"
            )


def _is_here(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True
