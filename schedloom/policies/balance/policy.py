"""Wait for the slowest rank instead of running away from it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schedloom.core.decisions import Admission, Verdict
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, PolicySettings
from schedloom.core.views import EngineView, PeerLoad, RequestView


class BalanceSettings(PolicySettings):
    """When a rank is full, whom to believe, and how long to wait."""

    full_kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Share of its KV blocks from which on a rank is full; it also is when all its slots are taken."""

    stale_seconds: Annotated[float, Field(gt=0)] = 1.0
    """What a rank said longer ago than this no longer counts."""

    max_hold_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Longest time without admissions on account of full peers; then this rank admits until none is full."""


class Balance(Policy):
    """Admits no fresh request while a data-parallel peer is full."""

    name = "balance"
    Settings = BalanceSettings
    conformance_never_rejects = True
    settings: BalanceSettings
    reads_peers = True

    def __init__(self, settings: BalanceSettings | None = None) -> None:
        super().__init__(settings)
        self._since: float | None = None
        self._asked = 0.0
        self._held: set[str] = set()

    @hookimpl
    def admit(self, request: RequestView, view: EngineView) -> Admission | None:
        full = next((peer for peer in view.peers if self._is_full(peer)), None)
        if full is not None and self._may_hold(view.now):
            self._held.add(request.request_id)
            return Admission(Verdict.HOLD, "peer_full", {"rank": full.rank, "age": full.age})
        self._since = None if full is None else self._since
        self._held.discard(request.request_id)
        return None

    @hookimpl
    def request_finished(self, request: RequestView, view: EngineView) -> None:
        self._held.discard(request.request_id)

    def _may_hold(self, now: float) -> bool:
        """Time counts while somebody waits, whether or not anybody asks: steps may be slow, and others come first."""
        nobody_waited = not self._held and now - self._asked > self.settings.stale_seconds
        self._asked = now
        self._since = now if self._since is None or nobody_waited else self._since
        return now - self._since < self.settings.max_hold_seconds

    def _is_full(self, peer: PeerLoad) -> bool:
        if peer.age > self.settings.stale_seconds:
            return False
        return peer.running >= peer.max_running or peer.kv_usage >= self.settings.full_kv_usage
