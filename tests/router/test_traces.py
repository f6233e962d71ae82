"""Some requests are told in full, as spans of OpenTelemetry (X9)."""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from schedloom.core.errors import ConfigurationError
from schedloom.router.headers import ClientHeaders
from schedloom.router.line import AsgiLine
from schedloom.router.reply import Reply
from schedloom.router.settings import TraceSettings
from schedloom.router.traces import Traces
from tests.router.conftest import Bench, Make
from tests.router.fakes import Answer, decoder, prefiller

pytestmark = pytest.mark.anyio

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED, UNTRACED = (f"00-{TRACE}-{PARENT}-{flags}" for flags in ("01", "00"))

Tell = Callable[[], Awaitable[list[ReadableSpan]]]


def traced(bench: Bench, ratio: float = 0.0) -> Tell:
    """Has ``bench`` tell its spans, once it is closed, to whoever calls what is returned."""
    exporter = InMemorySpanExporter()
    traces = bench.app.door.traces = Traces(TraceSettings(ratio=ratio), Random(0), exporter)

    async def told() -> list[ReadableSpan]:
        await traces.close()
        return list(exporter.get_finished_spans())

    return told


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def post(router: Bench, parent: str | None = None, **fields: Any) -> Any:
    body = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]} | fields
    headers = {"X-Session-ID": "s"} | ({} if parent is None else {"traceparent": parent})
    return await router.client.post("/v1/chat/completions", body, headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_and_its_attempts_are_spans_of_the_clients_trace(bench: Make, stream: bool) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    told = traced(router)
    assert (await post(router, TRACED, stream=stream)).text == " word word word"
    prefill, decode, request = await told()
    assert [span.name for span in (prefill, decode, request)] == ["prefill", "decode", "POST /v1/chat/completions"]
    assert request.parent is not None and f"{request.parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for span in (prefill, decode, request) if span.context} == {TRACE}
    assert attributes(request)["schedloom.decision"] == "pd" and attributes(request)["schedloom.outcome"] == "served"
    assert [attributes(span)["schedloom.engine"] for span in (prefill, decode)] == ["engine-0", "engine-1"]
    for span, engine in ((prefill, p), (decode, d)):
        assert span.context is not None and span.parent is not None and request.context is not None
        assert span.parent.span_id == request.context.span_id
        assert engine.seen[0].headers["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"


async def test_what_its_client_does_not_trace_is_not_traced(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    told = traced(router, ratio=1.0)
    await post(router, UNTRACED)
    assert await told() == []
    assert p.seen[0].headers["traceparent"] == d.seen[0].headers["traceparent"] == UNTRACED


@pytest.mark.parametrize("parent", ["", "00-x", "00-1-2-zz"])
async def test_nonsense_in_place_of_a_parent_is_no_trace(bench: Make, parent: str) -> None:
    router = await bench(prefiller(), decoder())
    told = traced(router)
    assert (await post(router, parent)).status == 200
    assert await told() == []


async def test_a_share_of_the_others_is_traced(bench: Make) -> None:
    router = await bench(prefiller(), decoder())
    told = traced(router, ratio=0.25)
    for _ in range(200):
        await post(router)
    requests = [span for span in await told() if span.name.startswith("POST")]
    assert 30 < len(requests) < 70
    assert {attributes(span)["schedloom.decision"] for span in requests} == {"append"}


async def test_what_failed_is_told_as_such(bench: Make) -> None:
    p, d = prefiller(), decoder()
    d.always = Answer.error(500)
    router = await bench(p, d)
    told = traced(router)
    assert (await post(router, TRACED)).status == 500
    *attempts, request = await told()
    assert not request.status.is_ok and attributes(request)["schedloom.outcome"] == "failed"
    endings = {span.name: (attributes(span)["schedloom.ending"], span.status.is_ok) for span in attempts}
    assert endings == {"prefill": ("answered", True), "decode": ("failed", False)}


@pytest.mark.parametrize("failing", [0, 1])
async def test_what_an_engine_refused_is_told_with_its_status(bench: Make, failing: int) -> None:
    engines = [prefiller(), decoder()]
    engines[failing].always = Answer.error(422)
    router = await bench(*engines)
    told = traced(router)
    received = await post(router, TRACED)
    *attempts, request = map(attributes, await told())
    assert (attempts[-1]["schedloom.ending"], attempts[-1]["http.response.status_code"]) == ("refused", 422)
    assert (request["schedloom.outcome"], request["http.response.status_code"]) == ("refused", 422)
    assert {one["schedloom.request_id"] for one in (*attempts, request)} == {received.headers["x-request-id"]}


def test_where_nobody_collects_them_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="is not the address of a collector"):
        TraceSettings(endpoint="collector:4318")


def test_without_opentelemetry_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"schedloom\[traces\]"):
        Traces(TraceSettings())


async def test_a_collector_that_is_not_there_holds_no_router_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    traces = Traces(TraceSettings(endpoint=f"http://127.0.0.1:{port}/v1/traces", ratio=1.0))
    for _ in range(2000):
        trace = traces.begin("/v1/chat/completions", "m", ClientHeaders([]))
        assert trace is not None
        trace.end(Reply(AsgiLine(_never, _never)), "served")
    begun = time.monotonic()
    await traces.close()
    assert time.monotonic() - begun < 4


async def _never(*_: Any) -> Any:
    raise AssertionError
