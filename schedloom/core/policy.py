"""The base of every policy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, Field

from schedloom.core.claims import Claims
from schedloom.core.settings import StrictSettings

API: Final = 1
"""The version of the hook specifications. It rises when a policy may rely on something that was not there before."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """Conditions that an engine must meet. Everything defaults to "no condition"."""

    decoder: bool = False
    prefix_caching: bool = False
    preempted_kv: bool = False
    """A KV connector that can save the KV of preempted requests."""
    chunked_prefill: bool = False

    @property
    def needed(self) -> list[str]:
        """The names of the conditions."""
        return [condition.name for condition in fields(self) if getattr(self, condition.name)]


class PolicySettings(StrictSettings):
    """The base of a policy's settings: a docstring under a field describes it."""


class ScoreSettings(PolicySettings):
    """The base of the settings of a policy that scores workers."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """How much this policy's scores count beside those of others."""


class Policy:
    """A scheduling policy: hook implementations over typed settings.

    A subclass sets ``name`` (its name in configuration, equal to its entry point's), ``Settings`` (a
    ``PolicySettings``), ``requires`` (what its engine must offer), ``claims`` (what it cannot share with other
    policies) and ``api`` (the version of the hook specifications that it was written for), and marks its methods
    with ``@hookimpl``. It is constructed once per composition and keeps no state beyond what its hooks are told.
    """

    name: ClassVar[str]
    api: ClassVar[int] = 1
    Settings: ClassVar[type[BaseModel]] = PolicySettings
    requires: ClassVar[Requirements] = Requirements()
    claims: ClassVar[Claims] = Claims()
    reads_peers: ClassVar[bool] = False
    """Whether the engine is to publish its load, and to show that of its peers in ``view.peers``."""
    hands_back: ClassVar[bool] = False
    """Whether ``recover`` may answer RETURN. The engine then also continues what other engines handed back."""
    listens: ClassVar[bool] = False
    """Whether the router is to listen to the engines' KV events, and to show what it knows in ``view.residency``."""
    conformance_settings: ClassVar[BaseModel | None] = None
    """Settings under which sequences of at most 192 tokens meet both sides of its thresholds."""
    conformance_never_rejects: ClassVar[bool] = False
    """Whether ``admit`` and ``screen`` never answer REJECT, so that the conformance suite waits for no rejection."""
    reads_tokens: bool = False
    """Whether the router is to have every prompt tokenized by an engine, and to show it in ``request.token_ids``."""

    def __init__(self, settings: Any = None) -> None:
        self.settings = settings if settings is not None else self.Settings()
