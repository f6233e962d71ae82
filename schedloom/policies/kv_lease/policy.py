"""Prefer the KV of a session that is likely to go on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, PolicySettings, Requirements
from schedloom.core.views import EngineView, PoolView, RequestView
from schedloom.policies.kv_lease.leases import Lease, Leases


class KVLeaseSettings(PolicySettings):
    """How long, and how much."""

    ttl_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Think time: seconds after the end of a turn for which its KV is preferred."""

    max_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of all KV blocks that may be on lease; beyond it the oldest leases end."""


class KVLease(Policy):
    """Keeps the blocks of finished turns away from the end of the free list at which blocks are reused."""

    name = "kv_lease"
    Settings = KVLeaseSettings
    settings: KVLeaseSettings
    conformance_settings = KVLeaseSettings(ttl_seconds=10)
    requires = Requirements(prefix_caching=True)

    def __init__(self, settings: KVLeaseSettings | None = None) -> None:
        super().__init__(settings)
        self._leases = Leases()

    @hookimpl
    def request_finished(self, request: RequestView, view: EngineView) -> None:
        if request.session is None:
            return
        blocks, cap = view.pool.blocks_of(request), self.settings.max_share * view.pool.num_blocks
        if not blocks:
            return
        self._leases.end(request.session)
        if len(blocks) > cap:
            return
        now = view.now
        lease = Lease(blocks, expires=now + self.settings.ttl_seconds)
        self._leases.start(request.session, lease, due=_due(view.pool))
        self._leases.shrink(int(cap), now)

    @hookimpl
    def step_begin(self, view: EngineView) -> None:
        if self._leases and view.pool.num_taken >= self._leases.next_due:
            self._refresh(view.pool, view.now)

    def _refresh(self, pool: PoolView, now: float) -> None:
        """Leases beyond half of the free blocks would be refreshed all the time, at the cost of one another."""
        self._leases.shrink(pool.num_free // 2, now)
        for session, lease in self._leases.take_due(pool.num_taken):
            if pool.refresh(lease.blocks):
                self._leases.start(session, lease, due=_due(pool))
            else:
                self._leases.end(session)


def _due(pool: PoolView) -> int:
    """When half of the free blocks, all of which are reused before those that come now, will have been taken."""
    return pool.num_taken + pool.num_free // 2
