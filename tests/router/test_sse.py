from __future__ import annotations

import json

import pytest

from schedloom.router.sse import (
    EventFramer,
    data_of,
    is_end,
    split_events,
    tells_an_error,
)

STREAM = b'data: {"a":1}\n\n: ping\n\nevent: x\ndata: two\ndata: lines\n\ndata: [DONE]\n\n'
WINDOWS = STREAM.replace(b"\n", b"\r\n")


@pytest.mark.parametrize("stream", [STREAM, WINDOWS])
def test_events_are_the_same_however_they_are_cut(stream: bytes) -> None:
    whole = list(split_events(stream))
    assert [data_of(event) for event in whole] == [b'{"a":1}', None, b"two\nlines", b"[DONE]"]
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1, 7):
            framer = EventFramer()
            fed = [framer.feed(part) for part in (stream[:first], stream[first:second], stream[second:])]
            assert b"".join(fed) == stream
            assert [event for events in fed for event in split_events(events)] == whole
            assert framer.rest == b""


def test_half_an_event_stays_behind() -> None:
    framer = EventFramer()
    assert framer.feed(b"data: one\n\ndata: tw") == b"data: one\n\n"
    assert framer.rest == b"data: tw"
    assert framer.feed(b"o\n") == b""
    assert framer.feed(b"\n") == b"data: two\n\n"


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"data:[DONE]\n\n", b"x\n\ndata: [DONE]\r\n\r\n"])
def test_the_end_mark_is_known(end: bytes) -> None:
    assert is_end(end)


@pytest.mark.parametrize("other", [b"", b"data: [DONE]x\n\n", b'data: "[DONE]"\n\n', b"data: [DONE]\n\ndata: x\n\n"])
def test_nothing_else_is_an_end_mark(other: bytes) -> None:
    assert not is_end(other)


def test_a_models_words_are_no_error() -> None:
    said = json.dumps({"choices": [{"delta": {"content": 'data: {"error": 1}'}}]}).encode()
    assert not tells_an_error(b"data: %b\n\n" % said)
    assert tells_an_error(b'data: {"error": {"message": "x"}}\n\n')
