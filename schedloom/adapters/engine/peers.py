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
        self._slots: list[tuple[int, float, tuple[int, int, int, float]]] = []

    def publish(self, running: int, waiting: int, max_running: int, kv_usage: float) -> None:
        """Write this rank's load if it is time; always when the rank falls idle, because it may not write again."""
        now = self._clock()
        if running and now < self._next_write:
            return
        self._next_write = now + INTERVAL_SECONDS
        load = _LOAD.pack(running, waiting, max_running, kv_usage, now)
        os.pwrite(self._file, load + _CHECKSUM.pack(zlib.crc32(load)), self._rank * SLOT_BYTES)

    def peers(self) -> Sequence[PeerLoad]:
        now = self._clock()
        if now >= self._next_read:
            self._next_read = now + INTERVAL_SECONDS
            self._slots = self._read()
        return [
            PeerLoad(rank, now - stamp, running, waiting, max_running, kv_usage)
            for rank, stamp, (running, waiting, max_running, kv_usage) in self._slots
            if now >= stamp
        ]

    def close(self) -> None:
        """The ranks of a group start and end together: the first that ends takes the file away."""
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _read(self) -> list[tuple[int, float, tuple[int, int, int, float]]]:
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        slots = []
        for rank in range(-(-len(content) // SLOT_BYTES)):
            record = content[rank * SLOT_BYTES :][: _LOAD.size + _CHECKSUM.size]
            load, checksum = record[: _LOAD.size], record[_LOAD.size :]
            if rank != self._rank and any(load) and checksum == _CHECKSUM.pack(zlib.crc32(load)):
                running, waiting, max_running, kv_usage, stamp = _LOAD.unpack(load)
                slots.append((rank, stamp, (running, waiting, max_running, kv_usage)))
        return slots


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
