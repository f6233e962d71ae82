"""Texts that people wrote, read without losing anything: no key stands twice, and no tag makes an object."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import yaml

from schedloom.core.errors import ConfigurationError

_MERGE: Final = "tag:yaml.org,2002:merge"


def read_mapping(path: Path) -> dict[str, Any]:
    """What a YAML or JSON file holds. Raises ConfigurationError when it cannot be read or is no mapping."""
    try:
        values = _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold a mapping at its top level")
    return values


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError for what is no JSON, and for a key that stands twice."""
    try:
        return json.loads(text, object_pairs_hook=_without_twins)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _parse(text: str) -> Any:
    """JSON as JSON: read as YAML it may not be indented by tabs, and 1e3 is no number in it."""
    try:
        return parse_json(text)
    except json.JSONDecodeError:
        return yaml.load(text, _StrictLoader)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twin = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"key {twin!r} stands twice")
    return values


class _StrictLoader(yaml.SafeLoader):
    """YAML without tags, in which no key stands twice and nothing holds itself."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """At once: what holds itself is found where it would be made."""
        return super().construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: list[Any] = []
        for key in (key for key, _ in node.value if key.tag != _MERGE):
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise yaml.YAMLError(f"key {name!r} stands twice, again in line {key.start_mark.line + 1}")
            seen.append(name)
        return super().construct_mapping(node, deep)
