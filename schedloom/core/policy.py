"""The base of every policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, slots=True)
class Requirements:
    """Conditions that an engine must meet. Everything defaults to "no condition"."""

    decoder: bool = False
    prefix_caching: bool = False


class NoSettings(BaseModel):
    """The settings of a policy that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Policy:
    """A scheduling policy: hook implementations over typed settings.

    A subclass sets ``name`` (its name in configuration, equal to its entry point's), ``Settings`` (a pydantic model
    that refuses unknown keys), ``requires`` (what its engine must offer), and marks its methods with ``@hookimpl``.
    It is constructed once per composition and keeps no state beyond what its hooks are told.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[BaseModel]] = NoSettings
    requires: ClassVar[Requirements] = Requirements()

    def __init__(self, settings: Any = None) -> None:
        self.settings = settings if settings is not None else self.Settings()
