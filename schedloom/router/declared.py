"""What a router's configuration file shows of its fleet before anybody is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedloom.core.diagnosis import Prospect
from schedloom.core.policy import Policy
from schedloom.core.wire import EngineContract
from schedloom.router.extras import missing
from schedloom.router.fleet.checks import KINDS, Member, all_drain, complaints, doubt, none_can, unnamed
from schedloom.router.fleet.worker import Worker
from schedloom.router.settings import BY_OPTIONS, RouterSettings


def forecast(values: Mapping[str, Any], section: RouterSettings, policies: Sequence[Policy]) -> Prospect:
    """Whom the fleet lacks, which declared contracts a start would refuse, and what it would need or could not know."""
    absent = tuple(missing(section, policies))
    if not section.workers:
        return Prospect(notes=(f"it names no workers: name all engines with {BY_OPTIONS}", *absent))
    doubts = [doubt(member, section) for member in _declared(section).values()]
    return Prospect(tuple(refusals(section)), (*filter(None, doubts), *absent))


def refusals(settings: RouterSettings) -> list[str]:
    """Why a start would refuse the engines, as far as nobody needs to be asked."""
    gaps = [unnamed(kind, role, settings.workers) or _unusable(kind, role, settings) for kind, role in KINDS]
    return [*filter(None, gaps), *_misfits(settings)]


def _unusable(kind: str, role: str, settings: RouterSettings) -> str | None:
    """What to say where none of those who may be a ``kind`` by their role will be one."""
    asked = [worker for worker in settings.workers if worker.role in (None, role)]
    able = [worker for worker in asked if worker.contract is None or _can(role, worker.contract)]
    if not able:
        return none_can(kind, role)
    return all_drain(kind) if all(worker.drain for worker in able) else None


def _can(role: str, contract: EngineContract) -> bool:
    return contract.can_prefill if role == "prefill" else contract.can_decode


def _declared(settings: RouterSettings) -> dict[int, Member]:
    """Those who do not tell what they are, by their places."""
    return {
        place: (Worker(str(place), worker), worker.contract)
        for place, worker in enumerate(settings.workers)
        if worker.contract is not None
    }


def _misfits(settings: RouterSettings) -> list[str]:
    found: list[str] = []
    fitting: list[Member] = []
    for place, member in _declared(settings).items():
        reasons = [f"workers[{place}].contract: {reason}" for reason in complaints(member, fitting, settings)]
        found += reasons
        if not reasons:
            fitting.append(member)
    return found
