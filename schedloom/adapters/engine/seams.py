"""The places where schedloom touches vLLM's scheduler, and the signatures that it relies on.

A seam that is missing or has changed is refused when a scheduler is composed, before any request is served.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

SUPPORTED = ("0.31", "0.32", "0.33")


@dataclass(frozen=True, slots=True)
class Seam:
    """A method of vLLM's ``Scheduler``: its parameters after ``self``, as every supported version names them.

    ``later`` holds parameters that newer supported versions added; all of them have defaults.
    """

    method: str
    parameters: tuple[str, ...]
    later: tuple[str, ...] = ()


SEAMS = (
    Seam("add_request", ("request",)),
    Seam("schedule", ("throttle_prefills",)),
    Seam("update_from_output", ("scheduler_output", "model_runner_output")),
    Seam("finish_requests", ("request_ids", "finished_status")),
    Seam("_handle_blocked_waiting_request", ("request",)),
    Seam("_free_request", ("request", "delay_free_blocks")),
    Seam("_preempt_request", ("request", "timestamp", "drop_stale_output")),
    Seam("_reserve_prefill_lookahead", ("request", "num_computed_tokens", "num_new_tokens")),
    Seam("reset_prefix_cache", ("reset_running_requests", "reset_connector")),
    Seam("set_pause_state", ("pause_state",)),
    Seam("shutdown", ()),
    Seam("_get_local_prefix_cache_hit", ("request",), later=("max_cache_hit_length",)),
)


class SeamError(RuntimeError):
    """The installed vLLM does not have a seam in the form that schedloom was written against."""


def check(scheduler: type) -> None:
    """Raises SeamError naming the first seam that ``scheduler`` lacks or has changed, with both signatures."""
    for seam in SEAMS:
        found = _parameters(getattr(scheduler, seam.method, None))
        if found is None:
            raise SeamError(_message(scheduler, seam, "it is missing"))
        if not _fits(seam, found):
            raise SeamError(_message(scheduler, seam, f"it takes ({', '.join(found)})"))


def _parameters(method: Any) -> tuple[str, ...] | None:
    return None if method is None else tuple(inspect.signature(method).parameters)[1:]


def _fits(seam: Seam, found: tuple[str, ...]) -> bool:
    head, tail = found[: len(seam.parameters)], found[len(seam.parameters) :]
    return head == seam.parameters and set(tail) <= set(seam.later)


def _message(scheduler: type, seam: Seam, problem: str) -> str:
    expected = ", ".join((*seam.parameters, *(f"[{name}]" for name in seam.later)))
    return (
        f"schedloom needs {scheduler.__name__}.{seam.method}({expected}), but {problem}: "
        f"install vLLM {', '.join(SUPPORTED)}, or a schedloom release that supports yours"
    )
