"""Sessions in a Valkey or Redis server, for several routers."""

from __future__ import annotations

from typing import Any

import orjson

from schedloom.core.errors import ConfigurationError
from schedloom.core.routing import SessionOwner
from schedloom.router.fleet.roster import Roster
from schedloom.router.sessions.store import SessionKey


class RedisSessions:
    """Ownership in a server at ``url``, forgotten when idle for ``idle_seconds``.

    An owner is known by its engine's address, which is the same in all routers, as its name in ``roster`` need not be;
    whose roster does not have it knows no owner. Session ids are kept as digests. How many sessions fit is the server's
    to bound (``maxmemory``). Raises ConfigurationError when the client library is not installed.
    """

    def __init__(self, url: str, roster: Roster, idle_seconds: float) -> None:
        try:
            from redis.asyncio import Redis
        except ImportError as error:
            raise ConfigurationError(
                "session_store needs a Redis client; run pip install '/path/to/schedloom[sessions]' (a checkout)"
            ) from error
        self._client: Any = Redis.from_url(url)
        self._idle_milliseconds = max(1, round(idle_seconds * 1000))
        self._roster = roster

    async def owner(self, key: SessionKey) -> SessionOwner | None:
        found = await self._client.getex(_name(key), px=self._idle_milliseconds)
        if found is None:
            return None
        engine, epoch, rank = orjson.loads(found)
        worker = self._roster.name_at(engine)
        return None if worker is None else SessionOwner(worker, epoch, rank)

    async def bind(self, key: SessionKey, owner: SessionOwner) -> None:
        engine = self._roster.url_of(owner.worker)
        if engine is not None:
            value = orjson.dumps([engine, owner.epoch, owner.rank])
            await self._client.set(_name(key), value, px=self._idle_milliseconds)

    async def close(self) -> None:
        await self._client.aclose()


def _name(key: SessionKey) -> str:
    return f"schedloom:owner:{key.digest().hex()}"
