"""Sessions in a Valkey or Redis server, for several routers."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from schedloom.core.errors import ConfigurationError
from schedloom.core.routing import SessionOwner
from schedloom.router.sessions import SessionKey


class RedisSessions:
    """Ownership in a server at ``url``, forgotten when idle for ``idle_seconds``.

    Routers share sessions only where they name the same ``engines`` in the same order: an owner is known by its
    engine's place. Session ids are kept as digests. How many sessions fit is the server's to bound (``maxmemory``).
    Raises ConfigurationError when the client library is not installed.
    """

    def __init__(self, url: str, engines: list[str], idle_seconds: float) -> None:
        try:
            from redis.asyncio import Redis
        except ImportError as error:
            raise ConfigurationError(
                "session_store needs a Redis client; run pip install '/path/to/schedloom[sessions]' (a checkout)"
            ) from error
        self._client: Any = Redis.from_url(url)
        self._idle_milliseconds = max(1, round(idle_seconds * 1000))
        self._prefix = f"schedloom:owner:{hashlib.sha256(orjson.dumps(engines)).hexdigest()[:16]}"

    async def owner(self, key: SessionKey) -> SessionOwner | None:
        found = await self._client.getex(self._name(key), px=self._idle_milliseconds)
        return None if found is None else SessionOwner(*orjson.loads(found))

    async def bind(self, key: SessionKey, owner: SessionOwner) -> None:
        value = orjson.dumps([owner.worker, owner.epoch, owner.rank])
        await self._client.set(self._name(key), value, px=self._idle_milliseconds)

    async def release(self, key: SessionKey) -> None:
        await self._client.delete(self._name(key))

    async def close(self) -> None:
        await self._client.aclose()

    def _name(self, key: SessionKey) -> str:
        return f"{self._prefix}:{key.digest().hex()}"
