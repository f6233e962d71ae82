"""Errors that say what to change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


class ConfigurationError(ValueError):
    """A configuration that cannot be used as it stands: one sentence for each complaint, which says what to change.

    ``status`` is that of the command which it ends.
    """

    status = 1

    def __init__(self, *sentences: str) -> None:
        super().__init__(*sentences)
        self.sentences = sentences

    def __str__(self) -> str:
        return "; ".join(self.sentences)


class PolicyCrashed(ConfigurationError):
    """A policy raised when it was only to be made: its author can mend that, whoever configures it cannot."""


class CalledWrongly(ConfigurationError):
    """Arguments of a command that do not make sense together, or name what is not there."""

    status = 2


def as_key(word: object) -> str:
    """``word`` as a key would be written: in small letters and joined by underscores."""
    return str(word).lower().replace("-", "_")


def suggestion(name: str, known: Iterable[str], described: str = "known") -> str:
    """The nearest of ``known`` to a wrong ``name``, or all of them when none is near."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1) or get_close_matches(as_key(name), names, n=1) or _longer(name, names)
    return f"did you mean {close[0]!r}?" if close else f"{described} are: {', '.join(names) or 'none'}"


def _longer(name: str, names: Iterable[str]) -> list[str]:
    """The one of ``names`` that has all words of ``name`` among its own, if it is one."""
    words = set(as_key(name).split("_"))
    found = [known for known in names if words <= set(as_key(known).split("_"))]
    return found if len(found) == 1 else []


def in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def explain(error: ValidationError, model: type[BaseModel], path: str = "") -> str:
    """The first of all ``complaints``."""
    return complaints(error, model, path)[0]


def complaints(error: ValidationError, model: type[BaseModel], path: str = "") -> list[str]:
    """All complaints of ``error``, each in one sentence, with its place under ``path``, where ``model`` stands.

    An unknown key is told together with the nearest key that is known in its place, and before anything else: a
    misspelled key is the usual reason for a missing one.
    """
    found = sorted(error.errors(), key=lambda complaint: complaint["type"] != "extra_forbidden")
    return [_sentence(complaint, model, path) for complaint in found]


def _sentence(complaint: ErrorDetails, model: type[BaseModel], path: str) -> str:
    # Where several models are possible, pydantic names the validator that one of them has.
    location = [part for part in complaint["loc"] if not str(part).startswith("function-wrap[")]
    kind = complaint["type"]
    where = place(path, location)
    if kind == "extra_forbidden":
        return f"unknown key {where!r}; {suggestion(str(location[-1]), _keys_at(model, location[:-1]))}"
    if kind == "missing":
        return f"{where} is missing{_nearly(complaint)}"
    found = complaint["input"]
    message = f"{where}: {_message(complaint, model)}" if where else _message(complaint, model)
    shown = isinstance(found, bool | int | float) or (kind == "bool_type" and isinstance(found, str))
    return f"{message}, not {found!r}" if shown else message


def _nearly(complaint: ErrorDetails) -> str:
    """The key that was perhaps meant to be the missing one, where any key may stand."""
    found = complaint["input"]
    near = get_close_matches(str(complaint["loc"][-1]), map(str, found), n=1) if isinstance(found, Mapping) else []
    return f"; it has a key {near[0]!r}" if near else ""


def _message(complaint: ErrorDetails, model: type[BaseModel]) -> str:
    kind = complaint["type"]
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"must be a mapping{_as_mapping(complaint['input'], model, complaint['loc'])}"
    if kind in ("list_type", "tuple_type", "set_type", "frozen_set_type"):
        return f"must be a list{_as_list(complaint['input'], model, complaint['loc'])}"
    if kind in ("too_short", "string_too_short"):
        least = complaint["ctx"]["min_length"]
        noun = "item" if isinstance(complaint["input"], list | tuple | dict) else "character"
        return f"must have at least {least} {noun}{'s' if least > 1 else ''}"
    message = complaint["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    return message.partition(", unable to ")[0]


def _as_mapping(found: object, model: type[BaseModel], location: Sequence[int | str]) -> str:
    """How a bare word is written in the place of a model that needs one key."""
    needed, others = _needed_key(_models_at(model, location))
    if not isinstance(found, str) or not location or not needed:
        return ""
    alone = f"{json.dumps(needed)}: {json.dumps(found)}"
    more = ", ".join(f"{json.dumps(key)}: …" for key in others)
    return f"; write {{{alone}}}" + f", or with more, {{{alone}, {more}}}" * bool(others)


def _as_list(found: object, model: type[BaseModel], location: Sequence[int | str]) -> str:
    """How a list is written, of models that need one key or of anything else."""
    items = _models_at(model, location)
    needed, _ = _needed_key(items)
    if not needed or items == _models_at(model, location[:-1]):
        return "; write [one, another], or each item in a line of its own behind a dash"
    value = json.dumps(found) if isinstance(found, str) else "…"
    return f" of mappings with {needed}; write [{{{json.dumps(needed)}: {value}}}]"


def _needed_key(models: Iterable[type[BaseModel]]) -> tuple[str | None, list[str]]:
    """The one key that ``models`` must have, if it is one, and those they may have."""
    fields = {key: field for model in models for key, field in model.model_fields.items()}
    required = [key for key, field in fields.items() if field.is_required()]
    return (required[0] if len(required) == 1 else None), [key for key in fields if key not in required]


def place(path: str, location: Sequence[int | str]) -> str:
    """``location`` below ``path`` as an operator would write it: ``policies[1].max_append_tokens``."""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _keys_at(model: type[BaseModel], location: Sequence[int | str]) -> set[str]:
    return {key for known in _models_at(model, location) for key in known.model_fields}


def _models_at(model: type[BaseModel], location: Sequence[int | str]) -> list[type[BaseModel]]:
    models = [model]
    for part in location:
        fields = [known.model_fields[part] for known in models if part in known.model_fields]
        # An index, a key of a mapping or the tag of a union names no field: the models stay.
        models = [inner for field in fields for inner in _models_in(field.annotation)] or models
    return models


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
