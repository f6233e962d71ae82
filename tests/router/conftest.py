from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from schedloom.router import endpoint
from schedloom.router.app import RouterApp
from schedloom.router.http.upstream import UpstreamRequest
from schedloom.router.laboratory.client import Client
from schedloom.router.sessions.store import MemorySessions
from schedloom.router.settings import RouterSettings, WorkerSettings, router_settings
from tests.router.fakes import FakeEngine, FakeResponse, FakeUpstream


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop that the router runs on, whose transports refuse what asyncio's let pass."""
    return ("asyncio", {"use_uvloop": True})


class _Unforeseen(logging.Handler):
    """What the router says of requests that it failed itself."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


@pytest.fixture(autouse=True)
def nothing_unforeseen(request: pytest.FixtureRequest) -> Iterator[None]:
    """No request ends in an error that nobody foresaw, whatever else a test looks at."""
    told, handler = logging.getLogger(endpoint.__name__), _Unforeseen()
    told.addHandler(handler)
    yield
    told.removeHandler(handler)
    assert not handler.said or request.node.get_closest_marker("unforeseen"), handler.said[0]


class Bench:
    """A router in front of fake engines, and a client of it."""

    def __init__(self, engines: list[FakeEngine], settings: RouterSettings) -> None:
        self.upstream = FakeUpstream(engines)
        self.app = RouterApp(settings, self.upstream)
        self.client = Client(self.app)
        self.engines = engines

    @property
    def sessions(self) -> MemorySessions:
        assert isinstance(self.app.sessions, MemorySessions)
        return self.app.sessions

    @property
    def in_flight(self) -> list[int]:
        return [worker.in_flight for worker in self.app.fleet.workers]

    def count(self, name: str, **labels: str) -> float:
        return self.app.metrics.registry.get_sample_value(f"schedloom_router_{name}", labels) or 0.0

    def watched(self) -> list[UpstreamRequest]:
        """What is sent from now on."""
        sent: list[UpstreamRequest] = []
        send = self.upstream.send

        async def note(request: UpstreamRequest) -> FakeResponse:
            sent.append(request)
            return await send(request)

        self.upstream.send = note  # type: ignore[method-assign]
        return sent

    def renew(self, *engines: FakeEngine, drain: FakeEngine | None = None) -> None:
        """As if the file named ``engines`` by now, one of which is to ``drain``."""
        self.engines.extend(engine for engine in engines if engine not in self.engines)
        self.upstream.engines.update({engine.origin: engine for engine in engines})
        self.app.roster.renew([WorkerSettings(url=one.origin, drain=one is drain) for one in engines])
        self.app.renew()

    @property
    def states(self) -> dict[str, str]:
        return {worker.name: worker.health.value for worker in self.app.fleet.workers}

    def seen(self) -> list[tuple[str, str]]:
        """Every generation request that reached an engine, as (engine, kind)."""
        return [(engine.origin, seen.path) for engine in self.engines for seen in engine.seen]


Make = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def bench() -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:

        async def make(*engines: FakeEngine, append: bool = True, **settings: Any) -> Bench:
            bench = Bench(list(engines), settings_for(engines, append, **settings))
            await bench.app.start()
            stack.push_async_callback(bench.app.close)
            stack.callback(lambda: _all_quiet(bench))
            return bench

        yield make


def settings_for(engines: Any, append: bool = True, **settings: Any) -> RouterSettings:
    workers = [WorkerSettings(url=engine.origin) for engine in engines]
    return router_settings({"workers": workers, "enable_decoder_append_prefill": append} | settings)


def _all_quiet(bench: Bench) -> None:
    assert not any(bench.in_flight)
    assert [engine.open for engine in bench.engines] == [0] * len(bench.engines)
    assert bench.count("in_flight") == 0
    results = ("hit", "rejected", "error")
    assert bench.count("local_attempts_total") == sum(
        bench.count("local_attempt_results_total", result=result) for result in results
    )
    assert bench.count("handed_back_total") == sum(
        bench.count("continuations_total", result=result) for result in ("continued", "failed")
    )
