"""Errors that say what to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


class ConfigurationError(ValueError):
    """A configuration that cannot be used as it stands. The message is one sentence and says what to change."""


def suggestion(name: str, known: Iterable[str], described: str = "known") -> str:
    """The nearest of ``known`` to a wrong ``name``, or all of them when none is near."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{described} are: {', '.join(names) or 'none'}"


def explain(error: ValidationError, model: type[BaseModel], path: str = "") -> str:
    """One complaint of ``error`` in one sentence, with its place under ``path``, where ``model`` stands.

    An unknown key is told together with the nearest key that is known in its place, and before anything else: a
    misspelled key is the usual reason for a missing one.
    """
    first = min(error.errors(), key=lambda complaint: complaint["type"] != "extra_forbidden")
    location = first["loc"]
    where = place(path, location) or "the section"
    if first["type"] == "extra_forbidden":
        known = _keys_at(model, location[:-1])
        return f"unknown key {where!r}; {suggestion(str(location[-1]), known)}"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"


def place(path: str, location: Sequence[int | str]) -> str:
    """``location`` below ``path`` as an operator would write it: ``policies[1].max_append_tokens``."""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _keys_at(model: type[BaseModel], location: Sequence[int | str]) -> set[str]:
    models = [model]
    for part in location:
        fields = [known.model_fields[part] for known in models if part in known.model_fields]
        # An index, a key of a mapping or the tag of a union names no field: the models stay.
        models = [inner for field in fields for inner in _models_in(field.annotation)] or models
    return {key for known in models for key in known.model_fields}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
