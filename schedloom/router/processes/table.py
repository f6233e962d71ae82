"""The sessions of a router with several processes: a table in memory that all of them have."""

from __future__ import annotations

import mmap
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import orjson

from schedloom.core.routing import SessionOwner
from schedloom.router.sessions import SessionKey

_WAYS: Final = 8
_SLOT_BYTES: Final = 112
_TIMES: Final = struct.Struct(f"={_WAYS}d")
_TIME: Final = struct.Struct("=d")
_HEAD: Final = struct.Struct("=IH16s")
_BUCKET_BYTES: Final = _TIMES.size + _WAYS * _SLOT_BYTES
_MOST_BYTES: Final = _SLOT_BYTES - _HEAD.size
_DIGEST_AT: Final = _HEAD.size - 16


class SharedSessions:
    """Ownership in a file that every process has mapped; ``create`` makes it.

    A session may stand in one bucket of eight slots, where the least recently used gives way to another. Nothing is
    locked: a slot that two processes write at once fails its checksum, and holds nothing then. A session that is so
    forgotten costs one ordinary prefill. ``clock`` is one that all processes share; a session that was idle for longer
    than ``idle_seconds`` of it is forgotten.
    """

    def __init__(self, path: Path, idle_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._buckets = len(self._memory) // _BUCKET_BYTES
        self._idle_seconds = idle_seconds
        self._clock = clock

    @staticmethod
    def create(path: Path, capacity: int) -> None:
        """A file for ``capacity`` sessions and as many again, so that few buckets are full before."""
        buckets = -(-2 * capacity // _WAYS)
        with path.open("xb") as file:
            file.truncate(buckets * _BUCKET_BYTES)

    async def owner(self, key: SessionKey) -> SessionOwner | None:
        return self.find(key)

    async def bind(self, key: SessionKey, owner: SessionOwner) -> None:
        self.keep(key, owner)

    async def release(self, key: SessionKey) -> None:
        digest = key.digest()
        bucket = self._bucket_of(digest)
        way = self._way_of(digest, bucket)
        if way is not None:
            self._write(bucket, way, bytes(16), b"", 0.0)

    async def close(self) -> None:
        self._memory.close()

    def find(self, key: SessionKey) -> SessionOwner | None:
        digest = key.digest()
        bucket = self._bucket_of(digest)
        way = self._way_of(digest, bucket)
        if way is None:
            return None
        now, used_at = self._clock(), bucket + way * _TIME.size
        owner = self._read(bucket, way, digest)
        if owner is None or now - _TIME.unpack_from(self._memory, used_at)[0] > self._idle_seconds:
            return None
        _TIME.pack_into(self._memory, used_at, now)
        return SessionOwner(*orjson.loads(owner))

    def keep(self, key: SessionKey, owner: SessionOwner) -> None:
        """An owner of a name or epoch too long for a slot is not kept."""
        written = orjson.dumps([owner.worker, owner.epoch, owner.rank])
        if len(written) > _MOST_BYTES:
            return
        digest = key.digest()
        bucket = self._bucket_of(digest)
        way = self._way_of(digest, bucket)
        if way is None:
            used = _TIMES.unpack_from(self._memory, bucket)
            way = used.index(min(used))
        self._write(bucket, way, digest, written, self._clock())

    def _bucket_of(self, digest: bytes) -> int:
        """Where it begins."""
        return int.from_bytes(digest[:8], "little") % self._buckets * _BUCKET_BYTES

    def _way_of(self, digest: bytes, bucket: int) -> int | None:
        slots = bucket + _TIMES.size
        at = self._memory.find(digest, slots, slots + _WAYS * _SLOT_BYTES) - slots - _DIGEST_AT
        return at // _SLOT_BYTES if at >= 0 else None

    def _read(self, bucket: int, way: int, digest: bytes) -> bytes | None:
        """What a slot holds, unless another process has taken or begun to take it meanwhile."""
        begin = bucket + _TIMES.size + way * _SLOT_BYTES
        slot = self._memory[begin : begin + _SLOT_BYTES]
        checksum, length, _ = _HEAD.unpack_from(slot)
        sure = slot[_DIGEST_AT : _HEAD.size + length]
        return sure[16:] if sure.startswith(digest) and zlib.crc32(sure) == checksum else None

    def _write(self, bucket: int, way: int, digest: bytes, owner: bytes, used: float) -> None:
        begin = bucket + _TIMES.size + way * _SLOT_BYTES
        slot = _HEAD.pack(zlib.crc32(digest + owner), len(owner), digest) + owner
        self._memory[begin : begin + len(slot)] = slot
        _TIME.pack_into(self._memory, bucket + way * _TIME.size, used)
