"""The sessions of a router with several processes: a table in memory that all of them have."""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import orjson

from schedloom.core.errors import ConfigurationError
from schedloom.core.routing import SessionOwner
from schedloom.router.sessions.store import SessionKey

_WAYS: Final = 8
_BUCKET_BYTES: Final = 1024
_TIME: Final = struct.Struct("=d")
_TIMES: Final = struct.Struct(f"={_WAYS}d")
_DIGEST_BYTES: Final = 16
_DIGESTS_AT: Final = _TIMES.size
_SLOTS_AT: Final = _DIGESTS_AT + _WAYS * _DIGEST_BYTES
_SLOT_BYTES: Final = (_BUCKET_BYTES - _SLOTS_AT) // _WAYS
_HEAD: Final = struct.Struct("=IH")
_MOST_BYTES: Final = _SLOT_BYTES - _HEAD.size


class SharedSessions:
    """Ownership in a file that every process has mapped; ``create`` makes it.

    A session may stand in one bucket, which is eight instants of last use, eight digests of keys and eight slots for
    owners; the least recently used gives way to another. Nothing is locked: a slot's checksum is that of its owner and
    its key, so that what two processes write at once holds nothing. A session that is so forgotten costs one ordinary
    prefill. ``clock`` is one that all processes share; a session that was idle for longer than ``idle_seconds`` of it
    is forgotten.
    """

    def __init__(self, path: Path, idle_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._buckets = len(self._memory) // _BUCKET_BYTES
        self._idle_seconds = idle_seconds
        self._clock = clock

    @staticmethod
    def create(path: Path, capacity: int) -> None:
        """A file for ``capacity`` sessions and as many again, so that few buckets are full before.

        Raises ConfigurationError where there is no room for it: that must not show when a session is kept, which would
        kill the process.
        """
        size = -(-2 * capacity // _WAYS) * _BUCKET_BYTES
        with path.open("xb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except (OSError, OverflowError) as error:
                raise ConfigurationError(
                    f"no room for session_capacity {capacity} ({-(-size // 2**20)} MiB in {path.parent}: {error}); "
                    f"set it lower, or TMPDIR to a folder with room"
                ) from error

    async def owner(self, key: SessionKey) -> SessionOwner | None:
        return self.find(key)

    async def bind(self, key: SessionKey, owner: SessionOwner) -> None:
        self.keep(key, owner)

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
        """Of an owner whose name or epoch is too long for a slot nothing is kept, nor of whoever was it before."""
        written = orjson.dumps([owner.worker, owner.epoch, owner.rank])
        if len(written) > _MOST_BYTES:
            return self._forget(key)
        digest = key.digest()
        bucket = self._bucket_of(digest)
        way = self._way_of(digest, bucket)
        if way is None:
            used = _TIMES.unpack_from(self._memory, bucket)
            way = used.index(min(used))
        return self._write(bucket, way, digest, written, self._clock())

    def _forget(self, key: SessionKey) -> None:
        digest = key.digest()
        bucket = self._bucket_of(digest)
        way = self._way_of(digest, bucket)
        if way is not None:
            self._write(bucket, way, bytes(_DIGEST_BYTES), b"", 0.0)

    def _bucket_of(self, digest: bytes) -> int:
        """Where it begins."""
        return int.from_bytes(digest[:8], "little") % self._buckets * _BUCKET_BYTES

    def _way_of(self, digest: bytes, bucket: int) -> int | None:
        digests = bucket + _DIGESTS_AT
        at = self._memory.find(digest, digests, bucket + _SLOTS_AT) - digests
        return at // _DIGEST_BYTES if at >= 0 else None

    def _read(self, bucket: int, way: int, digest: bytes) -> bytes | None:
        """What is kept for a key, unless another process has taken its slot, or half taken it, meanwhile."""
        begin = bucket + _SLOTS_AT + way * _SLOT_BYTES
        slot = self._memory[begin : begin + _SLOT_BYTES]
        checksum, length = _HEAD.unpack_from(slot)
        owner = slot[_HEAD.size : _HEAD.size + length]
        return owner if zlib.crc32(digest + owner) == checksum else None

    def _write(self, bucket: int, way: int, digest: bytes, owner: bytes, used: float) -> None:
        slot = bucket + _SLOTS_AT + way * _SLOT_BYTES
        written = _HEAD.pack(zlib.crc32(digest + owner), len(owner)) + owner
        self._memory[slot : slot + len(written)] = written
        name = bucket + _DIGESTS_AT + way * _DIGEST_BYTES
        self._memory[name : name + _DIGEST_BYTES] = digest
        _TIME.pack_into(self._memory, bucket + way * _TIME.size, used)
