"""What a router's configuration file shows of its fleet before anybody is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedloom.core.diagnosis import Prospect
from schedloom.core.policy import Policy
from schedloom.router.checks import KINDS, Member, complaint, unnamed
from schedloom.router.fleet import Worker
from schedloom.router.settings import BY_OPTIONS, RouterSettings


def forecast(values: Mapping[str, Any], section: RouterSettings, policies: Sequence[Policy]) -> Prospect:
    """Whom the fleet lacks, and which declared contracts a start would refuse."""
    if not section.workers:
        return Prospect(notes=(f"it names no workers: name all engines with {BY_OPTIONS}",))
    gaps = [unnamed(kind, role, section.workers) for kind, role in KINDS]
    return Prospect((*filter(None, gaps), *_misfits(section)))


def _misfits(settings: RouterSettings) -> list[str]:
    found: list[str] = []
    fitting: list[Member] = []
    for place, worker in enumerate(settings.workers):
        if worker.contract is None:
            continue
        member = (Worker(str(place), worker), worker.contract)
        reason = complaint(member, fitting, settings)
        if reason is None:
            fitting.append(member)
        else:
            found.append(f"workers[{place}].contract: {reason}")
    return found
