"""Some requests are told in full, as spans of OpenTelemetry (X9)."""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import orjson
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from schedloom.router.http.line import AsgiLine
from schedloom.router.http.upstream import Header, UpstreamRequest, UpstreamResponse
from schedloom.router.reply import Reply
from schedloom.router.requests.headers import ClientHeaders
from schedloom.router.settings import TraceSettings
from schedloom.router.telemetry.otlp import Kind, Span, collector, written
from schedloom.router.telemetry.traces import Traces
from tests.router.conftest import Bench, Make
from tests.router.fakes import Answer, decoder, prefiller
from tests.router.waiting import in_one_of

pytestmark = pytest.mark.anyio

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED, UNTRACED = (f"00-{TRACE}-{PARENT}-{flags}" for flags in ("01", "00"))

Fields = dict[str, Any]
Tell = Callable[[], Awaitable[list[Fields]]]


class Collector:
    """Takes what is told, as an upstream of its own."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        assert dict(request.headers)[b"content-type"] == b"application/json" and request.path == "/v1/traces"
        self.bodies.append(request.body)
        return Taken()

    def heard_at(self, origin: str) -> float:
        return 0.0

    def give_up(self, origin: str) -> int:
        return 0

    def forget(self, origin: str) -> None:
        return None

    async def close(self) -> None:
        return None

    @property
    def spans(self) -> list[Fields]:
        found = [resource for body in self.bodies for resource in orjson.loads(body)["resourceSpans"]]
        return [span for resource in found for scope in resource["scopeSpans"] for span in scope["spans"]]


class Taken(UpstreamResponse):
    status = 200
    headers: list[Header] = []  # noqa: RUF012

    async def read(self) -> bytes:
        return b""

    def close(self) -> None:
        return None


def traced(bench: Bench, ratio: float = 0.0) -> Tell:
    """Has ``bench`` tell its spans, once it is closed, to whoever calls what is returned."""
    taker = Collector()
    traces = bench.app.door.traces = Traces(TraceSettings(ratio=ratio), Random(0), taker)

    async def told() -> list[Fields]:
        await traces.close()
        return taker.spans

    return told


def attributes(span: Fields) -> Fields:
    values = {one["key"]: one["value"] for one in span["attributes"]}
    return {
        key: int(value["intValue"]) if "intValue" in value else next(iter(value.values()))
        for key, value in values.items()
    }


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
    assert [span["name"] for span in (prefill, decode, request)] == ["prefill", "decode", "POST /v1/chat/completions"]
    assert request["parentSpanId"] == PARENT
    assert {span["traceId"] for span in (prefill, decode, request)} == {TRACE}
    assert int(request["startTimeUnixNano"]) <= int(decode["startTimeUnixNano"]) < int(request["endTimeUnixNano"])
    assert attributes(request)["schedloom.decision"] == "pd" and attributes(request)["schedloom.outcome"] == "served"
    assert [attributes(span)["schedloom.engine"] for span in (prefill, decode)] == ["engine-0", "engine-1"]
    for span, engine in ((prefill, p), (decode, d)):
        assert span["parentSpanId"] == request["spanId"]
        assert engine.seen[0].headers["traceparent"] == f"00-{TRACE}-{span['spanId']}-01"


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
    requests = [span for span in await told() if span["name"].startswith("POST")]
    assert 30 < len(requests) < 70
    assert {attributes(span)["schedloom.decision"] for span in requests} == {"append"}


async def test_what_failed_is_told_as_such(bench: Make) -> None:
    p, d = prefiller(), decoder()
    d.always = Answer.error(500)
    router = await bench(p, d)
    told = traced(router)
    assert (await post(router, TRACED)).status == 500
    *attempts, request = await told()
    assert request["status"] == {"code": 2} and attributes(request)["schedloom.outcome"] == "failed"
    endings = {span["name"]: (attributes(span)["schedloom.ending"], not span["status"]) for span in attempts}
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


def test_what_is_sent_is_what_the_protocol_has() -> None:
    """Held against OpenTelemetry's own description of it, in which ids are base64 where OTLP has them hexadecimal."""
    span = Span(TRACE, PARENT, "", "a", Kind.CLIENT, 1)
    span.about = {"text": "t", "number": 2**40, "part": 0.5, "none": None}
    span.end(failed=True)
    fields = orjson.loads(written("service", [span]))
    (told,) = fields["resourceSpans"][0]["scopeSpans"][0]["spans"]
    for key in ("traceId", "spanId"):
        told[key] = base64.b64encode(bytes.fromhex(told[key])).decode()
    read = json_format.ParseDict(fields, ExportTraceServiceRequest()).resource_spans[0]
    assert read.resource.attributes[0].value.string_value == "service"
    (one,) = read.scope_spans[0].spans
    assert (one.trace_id.hex(), one.span_id.hex(), one.kind, one.status.code) == (TRACE, PARENT, 3, 2)
    assert (one.start_time_unix_nano, one.end_time_unix_nano) == (1, span.ended)
    assert {each.key: each.value.WhichOneof("value") for each in one.attributes} == {
        "text": "string_value",
        "number": "int_value",
        "part": "double_value",
    }


def test_a_collector_may_want_a_password() -> None:
    origin, path, headers = collector("https://a%40b:c@host:1/v1/traces?x=1")
    assert (origin, path) == ("https://host:1", "/v1/traces?x=1")
    assert (b"authorization", b"Basic " + base64.b64encode(b"a@b:c")) in headers


@in_one_of(3)
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
