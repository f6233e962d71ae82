"""Where policies are found: the entry-point group that built-in and third-party policies share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from schedloom.core.errors import ConfigurationError
from schedloom.core.policy import Policy

GROUP = "schedloom.policies"


class Registry:
    """The installed policies by name. Nothing is imported before a policy is asked for.

    Raises ConfigurationError when two distributions register the same name, when a name is unknown, and when a
    policy cannot be imported or is not a ``Policy``.
    """

    def __init__(self, points: Iterable[EntryPoint] | None = None) -> None:
        self._points: dict[str, EntryPoint] = {}
        for point in entry_points(group=GROUP) if points is None else points:
            self._add(point)

    def _add(self, point: EntryPoint) -> None:
        other = self._points.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigurationError(
                f"two installed packages register a policy named {point.name!r}: {_origin(other)} and "
                f"{_origin(point)}; uninstall one of them"
            )

    def names(self) -> list[str]:
        return sorted(self._points)

    def load(self, name: str) -> type[Policy]:
        point = self._points.get(name)
        if point is None:
            raise ConfigurationError(f"there is no policy named {name!r}; {_suggestion(name, self.names())}")
        try:
            policy = point.load()
        except Exception as error:
            raise ConfigurationError(
                f"policy {name!r} of {_origin(point)} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        _check_policy(policy, point)
        return policy  # type: ignore[no-any-return]


def _check_policy(policy: object, point: EntryPoint) -> None:
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ConfigurationError(
            f"entry point {point.name!r} of {_origin(point)} must name a subclass of schedloom.Policy, not {policy!r}"
        )
    if getattr(policy, "name", None) != point.name:
        raise ConfigurationError(
            f"policy {policy.__qualname__} is registered as {point.name!r} but calls itself "
            f"{getattr(policy, 'name', None)!r}; make the two equal"
        )


def _origin(point: EntryPoint) -> str:
    package = point.dist.name if point.dist is not None else "an unnamed package"
    return f"{package} ({point.value})"


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"installed are: {', '.join(known) or 'none'}"
