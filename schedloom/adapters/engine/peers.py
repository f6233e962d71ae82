"""What the data-parallel ranks of one host let each other know: a small file in memory with a slot for each."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from schedloom.core.views import PeerLoad

INTERVAL_SECONDS = 0.02
"""A rank writes, and reads the others, at most this often."""

SLOT_BYTES = 64

_LOAD = struct.Struct("<IIIdd")
_CHECKSUM = struct.Struct("<I")


class LoadBoard:
    """One rank's end of the board. A slot that is torn, empty or older than this boot reads as silence."""

    def __init__(self, path: Path, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._rank, self._clock = path, rank, clock
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_uid != os.geteuid():
            os.close(self._file)
            raise PermissionError(f"{path} belongs to somebody else")
        self._next_write = self._next_read = 0.0
        self._heard: list[PeerLoad] = []

    def publish(self, running: int, waiting: int, max_running: int, kv_usage: float) -> None:
        """Write this rank's load if it is time; always when the rank falls idle, because it may not write again."""
        now = self._clock()
        if running and now < self._next_write:
            return
        self._next_write = now + INTERVAL_SECONDS
        load = _LOAD.pack(running, waiting, max_running, kv_usage, now)
        os.pwrite(self._file, load + _CHECKSUM.pack(zlib.crc32(load)), self._rank * SLOT_BYTES)

    def peers(self) -> Sequence[PeerLoad]:
        """The others as they were read last; their age is counted up to then."""
        now = self._clock()
        if now >= self._next_read:
            self._next_read = now + INTERVAL_SECONDS
            self._heard = self._read(now)
        return self._heard

    def close(self) -> None:
        """The ranks of a group start and end together: the first that ends takes the file away."""
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _read(self, now: float) -> list[PeerLoad]:
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        slots = {rank: content[rank * SLOT_BYTES :] for rank in range(-(-len(content) // SLOT_BYTES))}
        heard = (_parse(rank, slot, now) for rank, slot in slots.items() if rank != self._rank)
        return [peer for peer in heard if peer is not None]


def _parse(rank: int, slot: bytes, now: float) -> PeerLoad | None:
    load, checksum = slot[: _LOAD.size], slot[_LOAD.size :][: _CHECKSUM.size]
    if not any(load) or checksum != _CHECKSUM.pack(zlib.crc32(load)):
        return None
    running, waiting, max_running, kv_usage, written = _LOAD.unpack(load)
    return PeerLoad(rank, now - written, running, waiting, max_running, kv_usage) if written <= now else None


def open_board(parallel: Any) -> LoadBoard | None:
    """The board of the data-parallel group that a vLLM ``ParallelConfig`` puts this rank into; none for one alone."""
    if parallel.data_parallel_size <= 1:
        return None
    group = f"{parallel.data_parallel_master_ip}:{parallel.data_parallel_master_port}"
    name = f"schedloom-{os.geteuid()}-{hashlib.sha256(group.encode()).hexdigest()[:16]}.load"
    return LoadBoard(_memory() / name, parallel.data_parallel_rank)


def _memory() -> Path:
    with contextlib.suppress(OSError):
        shared = Path("/dev/shm")
        if shared.is_dir() and os.access(shared, os.W_OK):
            return shared
    return Path(tempfile.gettempdir())
