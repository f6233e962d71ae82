"""Which invariants a cell can try, and what must have happened in it for them to count as passed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from schedloom.conformance import subjects
from schedloom.conformance.cells import Cell
from schedloom.conformance.invariants import INVARIANTS
from schedloom.conformance.results import CellResult
from schedloom.conformance.verdicts import Verdict
from schedloom.core.hooks import hooks_of
from schedloom.core.policy import Policy

_TURNING_AWAY = ("admit", "screen")


def turns_away(cell: Any) -> bool:
    """Whether some policy of ``cell`` may turn requests away, as far as its hooks and its own word tell."""
    return any(_rejects(policy) for policy in subjects.plain(cell.policies))


def hands_back(cell: Cell) -> bool:
    """Whether some policy of ``cell`` may hand requests back to the router."""
    return any(policy.hands_back for policy in subjects.plain(cell.policies))


def _rejects(policy: Policy) -> bool:
    asked = any(hook in hooks_of(type(policy)) for hook in _TURNING_AWAY)
    return asked and not policy.conformance_never_rejects


def _always(cell: Cell) -> bool:
    return True


_CONDITIONS: dict[str, Callable[[Cell], bool]] = {
    "KV-3": lambda cell: cell.prefix_caching,
    "ISO-1": lambda cell: cell.prefix_caching,
    "KV-4": lambda cell: cell.role != "none",
    "FAIR-1": lambda cell: not cell.priority,
    "REJ-1": turns_away,
    "APP-1": lambda cell: "append_prefill" in cell.policies,
    "BAL-1": lambda cell: "balance" in cell.policies,
    "BAT-1": lambda cell: "batch_job_aware" in cell.policies,
    "ORD-1": lambda cell: bool({"batch_job_aware", "short_request_first"} & set(cell.policies)) and not cell.priority,
    "PHA-1": lambda cell: "phase_separation" in cell.policies,
    "PHA-2": lambda cell: "phase_separation" in cell.policies,
    "TPG-1": lambda cell: "tpot_guard" in cell.policies,
    "OFF-1": lambda cell: "offload_restore" in cell.policies,
    "LEA-1": lambda cell: "kv_lease" in cell.policies,
    "RET-1": hands_back,
    "RET-2": hands_back,
    "OBS-1": turns_away,
    "DET-1": lambda cell: len(cell.policies) > 1,
}

_EVENT_CONDITIONS: dict[str, Callable[[Cell], bool]] = {
    "aborted while in transfer": lambda cell: cell.receives,
    "zeroed": lambda cell: cell.zeroing,
    "draft accepted": lambda cell: cell.drafts,
    "draft rejected": lambda cell: cell.drafts,
    "block behind the window": lambda cell: cell.slides,
}


def applicable(cell: Any, tier: str = "T2") -> list[str]:
    """The ids of the invariants that ``cell`` tries."""
    ids = [invariant.id for invariant in INVARIANTS.values() if tier in invariant.tiers]
    conditions = _CONDITIONS if tier == "T2" else {"REJ-1": turns_away}
    return [name for name in ids if conditions.get(name, _always)(cell)]


def missing_events(cell: Cell, invariant: str, events: Counter[str]) -> list[str]:
    """What must still happen in ``cell`` before silence about ``invariant`` means anything."""
    needed = [name for name in INVARIANTS[invariant].events if _EVENT_CONDITIONS.get(name, _always)(cell)]
    return [name for name in needed if not events[name]]


def verdicts(cell: Cell, invariants: list[str], events: Counter[str]) -> tuple[dict[str, Verdict], list[str]]:
    """A verdict for each of ``invariants``, and all events that are missing."""
    found: dict[str, Verdict] = {}
    missing: dict[str, None] = {}
    for name in invariants:
        absent = missing_events(cell, name, events)
        missing |= dict.fromkeys(absent)
        found[name] = Verdict.INCONCLUSIVE if absent else Verdict.PASSED
    return found, list(missing)


def conclude(result: CellResult, needed: Iterable[str] = ()) -> None:
    """Say what the violations and events of ``result`` amount to; each of ``needed`` must have happened as well."""
    ids = applicable(result.cell, result.tier)
    result.invariants, missing = verdicts(result.cell, ids, result.events)
    settle(result, [*missing, *(event for event in needed if not result.events[event])])


def settle(result: CellResult, missing: list[str]) -> None:
    """The verdict, once it is known which events are ``missing`` and what else the invariants would say."""
    broken = sorted({violation.invariant for violation in result.violations})
    result.invariants |= dict.fromkeys(broken, Verdict.FAILED)
    result.missing = missing
    passed = Verdict.INCONCLUSIVE if missing else Verdict.PASSED
    result.verdict = Verdict.FAILED if broken else passed
