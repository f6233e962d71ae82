from __future__ import annotations

import json

import pytest

from schedloom.router.sse import data_of, split_events
from schedloom.router.transfer.redaction import redacted_events


def test_transfer_parameters_do_not_reach_a_client() -> None:
    leak = {"choices": [], "kv_transfer_params": {"remote_host": "10.0.0.7"}}
    events = b"data: one\n\ndata: %b\n\ndata: [DONE]\n\n" % json.dumps(leak).encode()
    clean = redacted_events(events)
    assert b"10.0.0.7" not in clean
    assert [data_of(event) for event in split_events(clean)][0::2] == [b"one", b"[DONE]"]
    harmless = b'data: {"kv_transfer_params":null}\n\n'
    assert redacted_events(harmless) is harmless


@pytest.mark.parametrize("key", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("events", ["event: {name}\ndata: {data}\n\n", "data: {data}\nevent: {name}\n\n"])
def test_an_event_keeps_its_name_and_tells_nothing_of_transfers_deep_within(events: str, key: str) -> None:
    response = {"id": "r", key: {"remote_host": "10.0.0.7"}, "tools": [{key: {}}]}
    told = {"type": "response.completed", "response": response}
    written = events.format(name="response.completed", data=json.dumps(told)).encode()
    clean = redacted_events(b"data: {}\n\n" + written)
    assert clean.startswith(b"data: {}\n\nevent: response.completed\ndata: ") and clean.endswith(b"\n\n")
    assert json.loads(data_of(clean[10:]) or b"") == told | {"response": response | {key: None}}
