"""Chunks as HTTP/1.1 frames them (RFC 9112, section 7.1), in the one way that this side and most engines have."""

from __future__ import annotations

from typing import Final

_LOOKED_AT: Final = 4096


def chunk_of(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def data_of(chunk: bytes) -> bytes:
    """What ``chunk_of`` was given."""
    return chunk[chunk.index(b"\n") + 1 : -2]


def _beginnings() -> tuple[bytes, ...]:
    """How a chunk of each length begins; where there is no such chunk, what is longer than any."""
    beginnings = [bytes(_LOOKED_AT)] * _LOOKED_AT
    for size in range(1, _LOOKED_AT):
        chunk = chunk_of(bytes(size))
        if len(chunk) < _LOOKED_AT:
            beginnings[len(chunk)] = b"%x\r\n" % size
    return tuple(beginnings)


_BEGINNINGS: Final = _beginnings()


def is_chunk_of_json(data: bytes) -> bool:
    """Whether ``data``, which begins where a chunk does, is that one and nothing else, as ``chunk_of`` makes it, and
    ends like an event with JSON in it. Chunks of 4,096 bytes and more are not looked at.
    """
    length = len(data)
    return data[-5:] == b"}\n\n\r\n" and length < _LOOKED_AT and data.startswith(_BEGINNINGS[length])
