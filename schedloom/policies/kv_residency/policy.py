"""Go by the KV that engines say they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from schedloom.core.claims import PREFIX_CHOICE, Claims
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, ScoreSettings
from schedloom.core.reuse import UsablePrefixRule
from schedloom.core.routing import Candidate, Held, Leg, RouteRequest, RoutingView


class KvResidencySettings(ScoreSettings):
    """When a local attempt is futile, and whether prompts are tokenized to know better."""

    min_reused_tokens: Annotated[int, Field(ge=1)] = 128
    """Tokens that a Decoder must hold for a local attempt to be made; as in the Decoders' ``append_prefill``."""

    max_append_tokens: Annotated[int, Field(ge=1)] = 2048
    """Tokens that may be left to compute, where the prompt's are known; as in the Decoders' ``append_prefill``."""

    tokenize: bool = False
    """Whether every prompt is tokenized by an engine, so that any prefix is found, not only a session's own."""


class KvResidency(Policy):
    """Prefers the engines that hold most of a prompt's KV, and makes no local attempt where too little is left."""

    name = "kv_residency"
    Settings = KvResidencySettings
    settings: KvResidencySettings
    claims = Claims(owns=frozenset({PREFIX_CHOICE}))
    listens = True

    def __init__(self, settings: KvResidencySettings | None = None) -> None:
        super().__init__(settings)
        self.reads_tokens = self.settings.tokenize
        self._usable = UsablePrefixRule(
            min_reused_tokens=self.settings.min_reused_tokens, max_append_tokens=self.settings.max_append_tokens
        )

    @hookimpl
    def filter_workers(
        self, request: RouteRequest, leg: Leg, candidates: Sequence[Candidate], view: RoutingView
    ) -> list[Candidate] | None:
        if leg is not Leg.APPEND:
            return None
        return [one for one in candidates if not self._is_futile(request, _held(request, one, view))]

    @hookimpl
    def score_workers(
        self, request: RouteRequest, candidates: Sequence[Candidate], view: RoutingView
    ) -> list[float] | None:
        held = [_held(request, one, view) for one in candidates]
        tokens = [0 if one is None else one.tokens for one in held]
        most = len(request.token_ids) if request.token_ids else max(tokens)
        return [number / most for number in tokens] if any(tokens) else None

    def _is_futile(self, request: RouteRequest, held: Held | None) -> bool:
        if held is None or not held.exact:
            return False
        if request.token_ids:
            return not self._usable.allows(len(request.token_ids), held.tokens)
        return held.tokens < self.settings.min_reused_tokens


def _held(request: RouteRequest, candidate: Candidate, view: RoutingView) -> Held | None:
    if request.token_ids:
        return view.residency.of_prompt(candidate, request.token_ids, request.cache_salt)
    return view.residency.of_session(candidate, request.session) if request.session else None
