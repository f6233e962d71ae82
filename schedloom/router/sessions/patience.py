"""A store of sessions that may fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from schedloom.core.routing import SessionOwner
from schedloom.router.fleet.breaker import Clock
from schedloom.router.sessions.store import SessionKey, SessionStore
from schedloom.router.tasks import within
from schedloom.router.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 0.5
REST_SECONDS: Final = 1.0

_Answer = TypeVar("_Answer")


class PatientSessions:
    """Sessions that are kept elsewhere. When that fails, or takes too long, no owner is known and nothing is recorded.

    After a failure the store is left alone for a while, so that requests do not wait for it one by one.
    """

    def __init__(self, store: SessionStore, metrics: Metrics, clock: Clock) -> None:
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._rests_until = 0.0
        self._is_well = True

    async def owner(self, key: SessionKey) -> SessionOwner | None:
        return await self._tried(lambda: self._store.owner(key))

    async def bind(self, key: SessionKey, owner: SessionOwner) -> None:
        await self._tried(lambda: self._store.bind(key, owner))

    async def close(self) -> None:
        await self._store.close()

    async def _tried(self, ask: Callable[[], Coroutine[Any, Any, _Answer]]) -> _Answer | None:
        if self._clock() < self._rests_until:
            return None
        try:
            answer = await within(PATIENCE_SECONDS, ask())
        except Exception as error:
            self._failed(error)
            return None
        self._is_well = True
        return answer

    def _failed(self, error: Exception) -> None:
        self._metrics.session_store_errors.inc()
        self._rests_until = self._clock() + REST_SECONDS
        if self._is_well:
            log.warning("the store of sessions fails, turns go through a Prefiller meanwhile: %r", error)
        self._is_well = False
