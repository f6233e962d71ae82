"""Requests leave nothing for the garbage collector: what waits for it fills caches with what is not used again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import orjson
import pytest

from schedloom.router.dispatch import Dispatch
from schedloom.router.fleet.worker import Service
from schedloom.router.http.exchange import ClientExchange
from schedloom.router.http.upstream import lines_of
from schedloom.router.reply import Reply
from schedloom.router.requests.body import GenerationBody
from schedloom.router.requests.call import Call
from schedloom.router.watch import Watch
from tests.router.conftest import Make
from tests.router.fakes import Answer, decoder, prefiller
from tests.router.test_server import connected

pytestmark = pytest.mark.anyio

OF_A_REQUEST = (Call, ClientExchange, Dispatch, GenerationBody, Reply, Service, Watch)


@pytest.fixture
def left() -> Iterator[Callable[[], list[object]]]:
    """What requests have left behind, by their kinds, while nobody collects it."""
    gc.collect()
    before = _of_requests()
    gc.disable()
    yield lambda: [one for one in _of_requests() if one not in before]
    gc.enable()


def _of_requests() -> list[object]:
    # Not isinstance, for which libraries that were loaded by other tests have answers of their own.
    return [one for one in gc.get_objects() if issubclass(type(one), OF_A_REQUEST)]


@pytest.mark.parametrize("policies", [[], ["session_owner", "prefix_aware", "power_of_two", "ttft_slo"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_request_made_goes_with_it(
    bench: Make, stream: bool, policies: list[str], left: Callable[[], list[object]]
) -> None:
    router = await bench(prefiller(), decoder(), policies=[{"name": name} for name in policies])
    for turn in range(6):
        async with connected(router.app) as (reader, writer):
            writer.write(_asked(f"s{turn // 2}", stream))
            assert b"200 OK" in await reader.read()
    assert not left()


@pytest.mark.parametrize("status", [400, 401, 503])
@pytest.mark.parametrize("failing", [0, 1])
async def test_what_an_engine_refuses_leaves_nothing_either(
    bench: Make, failing: int, status: int, left: Callable[[], list[object]]
) -> None:
    engines = [prefiller(), decoder()]
    engines[failing].always = Answer.error(status)
    router = await bench(*engines)
    for turn in range(3):
        async with connected(router.app) as (reader, writer):
            writer.write(_asked(f"s{turn}", False))
            assert b"200 OK" not in await reader.read()
    assert not left()


def _asked(session: str, stream: bool) -> bytes:
    body = orjson.dumps({"model": "fake-model", "messages": [], "stream": stream})
    lines = [(b"connection", b"close"), (b"x-session-id", session.encode()), (b"content-length", b"%d" % len(body))]
    return b"POST /v1/chat/completions HTTP/1.1\r\n%b\r\n%b" % (lines_of(lines), body)
