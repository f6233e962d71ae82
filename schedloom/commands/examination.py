"""A configuration file looked at as strictly as a start would look at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from schedloom.commands.documents import Document
from schedloom.core.composition import review
from schedloom.core.diagnosis import FORECASTS, Prospect
from schedloom.core.errors import ConfigurationError
from schedloom.core.policy import Policy
from schedloom.core.registry import Registry


@dataclass(frozen=True, slots=True)
class Examination:
    """The policies that a file switches on, all that a start would refuse, and what only the start can know."""

    policies: tuple[Policy, ...]
    complaints: tuple[str, ...]
    notes: tuple[str, ...]


def examine(document: Document, registry: Registry | None = None) -> Examination:
    found = review(document.section.choices, registry, document.side)
    ahead = _ahead(document, found.policies)
    return Examination(found.policies, (*found.complaints, *ahead.complaints), ahead.notes)


def _ahead(document: Document, policies: Sequence[Policy]) -> Prospect:
    (point,) = entry_points(group=FORECASTS, name=document.side)
    try:
        prospect: Prospect = point.load()(document.values, document.section, policies)
    except ConfigurationError as error:
        return Prospect(error.sentences)
    return prospect
