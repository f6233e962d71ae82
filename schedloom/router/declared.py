"""What a router's configuration file shows of its fleet before anybody is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedloom.core.diagnosis import Prospect
from schedloom.core.policy import Policy
from schedloom.router.extras import missing
from schedloom.router.fleet.checks import KINDS, Member, complaints, doubt, unnamed
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
    gaps = [unnamed(kind, role, settings.workers) for kind, role in KINDS]
    return [*filter(None, gaps), *_misfits(settings)]


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
