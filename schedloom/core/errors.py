"""Errors that say what to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


class ConfigurationError(ValueError):
    """A configuration that cannot be used as it stands: one sentence for each complaint, which says what to change."""

    def __init__(self, *sentences: str) -> None:
        super().__init__(*sentences)
        self.sentences = sentences

    def __str__(self) -> str:
        return "; ".join(self.sentences)


def suggestion(name: str, known: Iterable[str], described: str = "known") -> str:
    """The nearest of ``known`` to a wrong ``name``, or all of them when none is near."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{described} are: {', '.join(names) or 'none'}"


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
    location, kind = complaint["loc"], complaint["type"]
    where = place(path, location) or "the section"
    if kind == "extra_forbidden":
        return f"unknown key {where!r}; {suggestion(str(location[-1]), _keys_at(model, location[:-1]))}"
    if kind == "missing":
        return f"{where} is missing"
    message = complaint["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    found = complaint["input"]
    return f"{where}: {message}, not {found!r}" if isinstance(found, bool | int | float) else f"{where}: {message}"


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
