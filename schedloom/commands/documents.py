"""Configuration files: which side they are for, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Protocol

from pydantic import BaseModel, ValidationError

from schedloom.core.composition import PolicyChoice, review
from schedloom.core.config import PATH, SECTION, VLLM_OPTIONS, engine_key, refuse_misplaced
from schedloom.core.errors import ConfigurationError, complaints, place, suggestion
from schedloom.core.hooks import Side, hooks_of, side_of
from schedloom.core.reading import parse_json, read_mapping
from schedloom.core.registry import Registry

GROUP: Final = "schedloom.configurations"
"""Entry points that name the pydantic model of each side's configuration."""

_ADDITIONAL: Final = ("additional_config", "additional-config")
_VLLM_KEYS: Final = {key.replace("_", dash) for key in VLLM_OPTIONS for dash in "_-"}
_MISSPELLED: Final = 0.7
"""How alike a key must be to one of ours to be taken for it (``difflib``'s ratio)."""
_ROOT: Final[Mapping[Side, str]] = {"engine": PATH, "router": ""}


class Section(Protocol):
    """What the models of all sides have in common."""

    @property
    def choices(self) -> list[PolicyChoice]: ...

    @property
    def switches(self) -> Mapping[str, str]:
        """Keys that switch one policy on, each with the policy's name."""
        ...

    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Document:
    """The configuration of one side."""

    side: Side
    section: Section
    values: Mapping[str, Any]
    """The whole file."""


@cache
def section_models() -> Mapping[Side, type[BaseModel]]:
    """The model of every side."""
    return {point.name: point.load() for point in entry_points(group=GROUP)}  # type: ignore[misc]


def read_document(path: Path) -> Document:
    """Raises ConfigurationError with a sentence for each thing in the file that does not fit."""
    values = read_mapping(path)
    side = _side(values, path)
    section = _engine_section(values, path) if side == "engine" else values
    model = section_models()[side]
    try:
        return Document(side, model.model_validate(section), values)  # type: ignore[arg-type]
    except ValidationError as error:
        found = complaints(error, model, _ROOT[side]) + _about_policies(section, side)
        raise ConfigurationError(*(f"{path}: {one}" for one in found)) from error


def _about_policies(section: Any, side: Side) -> list[str]:
    """What is wrong with the policies of a section that does not fit for other reasons."""
    chosen = section.get("policies") if isinstance(section, Mapping) else None
    named = [(number, each) for number, each in enumerate(chosen if isinstance(chosen, list) else []) if _names(each)]
    choices = [PolicyChoice(**each).at(place(_ROOT[side], ["policies", number])) for number, each in named]
    return list(review(choices, side=side).complaints)


def _names(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry) and _is_text(entry.get("name"))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _side(values: Mapping[str, Any], path: Path) -> Side:
    sides = sorted(section_models())
    if "kind" in values:
        for side in sides:
            if values["kind"] == side:
                return side
        raise ConfigurationError(f"{path}: kind is {values['kind']!r}; {suggestion(str(values['kind']), sides)}")
    if {SECTION, *_ADDITIONAL} & values.keys():
        return "engine"
    if engine_key(values):
        return "engine"
    shapes = [side for side in sides if _own_keys(side) & values.keys()] or _sides_of_policies(values)
    if len(shapes) != 1:
        unknown = [key for key in values if not any(key in model.model_fields for model in section_models().values())]
        hint = f" (key {unknown[0]!r}: {suggestion(str(unknown[0]), _known_keys())})" if unknown else ""
        raise ConfigurationError(f"{path} may be for either side{hint}; say which in a key kind: {' or '.join(sides)}")
    return shapes[0]


def _hint(values: Mapping[str, Any]) -> str:
    """What a key was meant to be that is nearly one that leads to our section."""
    for key in map(str, values):
        for wanted in get_close_matches(key, [SECTION, *_ADDITIONAL], n=1, cutoff=_MISSPELLED):
            return f" (key {key!r}: did you mean {wanted!r}?)"
    return ""


def _sides_of_policies(values: Mapping[str, Any]) -> list[Side]:
    """The sides on which every named policy has something to do."""
    chosen, registry = values.get("policies"), Registry()
    names = [each["name"] for each in chosen if _names(each)] if isinstance(chosen, list) else []
    known = [registry.load(name) for name in names if name in registry.names()]
    sides = [{side_of(hook) for hook in hooks_of(policy)} for policy in known]
    return sorted(set.intersection(*sides)) if sides else []


def _known_keys() -> list[str]:
    return sorted({SECTION, *_ADDITIONAL, *(key for model in section_models().values() for key in model.model_fields)})


def _own_keys(side: Side) -> set[str]:
    """The keys that tell this side from the others."""
    others = {key for other, model in section_models().items() if other != side for key in model.model_fields}
    wrappers = {SECTION, *_ADDITIONAL} if side == "engine" else set()
    return wrappers | (section_models()[side].model_fields.keys() - others)


def _engine_section(values: Mapping[str, Any], path: Path) -> Any:
    """vLLM's own configuration file, the value of ``--additional-config``, or our section alone."""
    for key in values:
        if isinstance(key, str) and "-" in key and (twin := key.replace("-", "_")) in values:
            raise ConfigurationError(f"{path}: {key} stands there as {twin} too; keep one of the two")
    for key in _ADDITIONAL:
        if key in values:
            additional = _unquoted(values[key], path)
            _refuse_misplaced(additional, path)
            if not isinstance(additional, Mapping) or SECTION not in additional:
                hint = _hint(additional) if isinstance(additional, Mapping) else ""
                raise ConfigurationError(f"{path}: {key} has no {SECTION}, so no policy is on{hint}")
            return additional[SECTION]
    if SECTION in values:
        return values[SECTION]
    if _VLLM_KEYS & values.keys():
        raise ConfigurationError(
            f"{path} is vLLM's own file without {SECTION} under additional-config, so no policy is on{_hint(values)}"
        )
    return {key: values[key] for key in values if key != "kind"}


def _refuse_misplaced(additional: Any, path: Path) -> None:
    if isinstance(additional, Mapping) and SECTION in additional:
        try:
            refuse_misplaced(additional)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from error


def _unquoted(additional: Any, path: Path) -> Any:
    if not isinstance(additional, str):
        return additional
    try:
        return parse_json(additional)
    except ValueError as error:
        raise ConfigurationError(f"{path}: additional_config is no JSON: {error}") from error
