"""Where policies are found: the entry-point group that built-in and third-party policies share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, EntryPoint, entry_points

from pydantic import BaseModel

from schedloom.core.claims import Claims
from schedloom.core.errors import ConfigurationError, in_a_line, suggestion
from schedloom.core.hookspecs import PROJECT
from schedloom.core.policy import API, Policy, Requirements

GROUP = "schedloom.policies"


class Registry:
    """The installed policies by name. Nothing is imported before a policy is asked for.

    Raises ConfigurationError when two distributions register the same name, when a name is unknown, and when a
    policy cannot be imported, is not a ``Policy`` or was written for a newer schedloom.
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

    def distribution(self, name: str) -> Distribution | None:
        """Who brought a policy."""
        return self._find(name).dist

    def package(self, name: str) -> str:
        """Who brought a policy, with the version."""
        brought_by = self.distribution(name)
        return f"{brought_by.name} {brought_by.version}" if brought_by is not None else "unnamed"

    def is_built_in(self, name: str) -> bool:
        brought_by = self.distribution(name)
        return brought_by is not None and brought_by.name == PROJECT

    def load(self, name: str) -> type[Policy]:
        point = self._find(name)
        try:
            policy = point.load()
        except (Exception, SystemExit) as error:
            raise ConfigurationError(
                f"policy {name!r} of {_origin(point)} cannot be imported: {_import_complaint(error)}"
            ) from error
        _check_policy(policy, point)
        return policy  # type: ignore[no-any-return]

    def _find(self, name: str) -> EntryPoint:
        if name not in self._points:
            raise ConfigurationError(
                f"there is no policy named {name!r}; {suggestion(name, self._points, 'installed')}"
            )
        return self._points[name]


def _import_complaint(error: BaseException) -> str:
    missing = error.name if isinstance(error, ImportError) else None
    if missing and missing.split(".")[0] == PROJECT:
        return f"{error}; install a release of it that was made for this schedloom"
    if isinstance(error, ModuleNotFoundError):
        return f"the module {missing!r} is not installed; install the package again, with its dependencies"
    return in_a_line(error)


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
    for unfit in _unfit_attributes(policy):
        raise ConfigurationError(f"policy {point.name!r} of {_origin(point)}: {unfit}")
    if policy.Settings.model_config.get("extra") != "forbid":
        raise ConfigurationError(
            f"policy {point.name!r} of {_origin(point)} takes any setting, misspelled ones too; "
            "derive its Settings from schedloom.PolicySettings"
        )
    if policy.api > API:
        raise ConfigurationError(
            f"policy {point.name!r} of {_origin(point)} was written for version {policy.api} of the hooks and this "
            f"schedloom has version {API}; install a newer schedloom, or an older release of the policy"
        )


def _unfit_attributes(policy: type[Policy]) -> Iterator[str]:
    if not (isinstance(policy.Settings, type) and issubclass(policy.Settings, BaseModel)):
        yield f"Settings must be a subclass of PolicySettings, not {policy.Settings!r}"
    if type(policy.api) is not int:
        yield f"api must be a whole number, not {policy.api!r}"
    if not isinstance(policy.requires, Requirements):
        yield f"requires must be Requirements, not {policy.requires!r}"
    if not isinstance(policy.claims, Claims):
        yield f"claims must be Claims, not {policy.claims!r}"


def _origin(point: EntryPoint) -> str:
    package = point.dist.name if point.dist is not None else "an unnamed package"
    return f"{package} ({point.value})"
