"""B1, B7, B12: any number of Prefillers and Decoders, ranks numbered within each instance, IPv6."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from contextlib import AsyncExitStack, suppress

import httpx2
import pytest

from tests.router.conftest import Make
from tests.router.fakes import FakeEngine, decoder, prefiller
from tests.router.sockets import asgi, served
from tests.router.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

COUNTS = [(1, 1), (1, 3), (3, 1), (4, 2), (2, 5)]
STRATEGIES: list[list[str]] = [[], ["round_robin"], ["least_tokens", "prefix_aware"], ["prefill_cost"]]


def fleet(x: int, y: int) -> tuple[list[FakeEngine], list[FakeEngine]]:
    return [prefiller(n) for n in range(x)], [decoder(n) for n in range(y)]


@pytest.mark.parametrize(("x", "y"), COUNTS)
@pytest.mark.parametrize("strategies", STRATEGIES, ids=lambda names: "+".join(names) or "none")
async def test_every_engine_of_any_fleet_serves_its_share(bench: Make, x: int, y: int, strategies: list[str]) -> None:
    prefillers, decoders = fleet(x, y)
    router = await bench(*prefillers, *decoders, policies=[{"name": name} for name in strategies])
    for _ in range(x * y * 2):
        assert (await router.client.chat()).decision == "pd"
    assert [len(engine.seen) for engine in prefillers] == [y * 2] * x
    assert [len(engine.seen) for engine in decoders] == [x * 2] * y


@pytest.mark.parametrize(("x", "y"), COUNTS)
async def test_sessions_are_at_home_on_every_decoder_and_stay_there(bench: Make, x: int, y: int) -> None:
    prefillers, decoders = fleet(x, y)
    router = await bench(*prefillers, *decoders)
    homes: dict[str, set[str]] = {}
    for turn in range(3):
        for number in range(y):
            received = await router.client.chat(str(number))
            assert received.decision == ("append" if turn else "pd")
            homes.setdefault(str(number), set()).add(received.headers["x-schedloom-decoder"])
    assert len(set.union(*homes.values())) == y and all(len(home) == 1 for home in homes.values())


async def test_ranks_are_counted_within_each_instance(bench: Make) -> None:
    """Two instances that are parts of one data-parallel group, and one that is alone."""
    parts = [decoder(0, data_parallel_size=2), decoder(1, data_parallel_size=3), decoder(2)]
    router = await bench(prefiller(), *parts)
    for _ in range(2):
        for session in range(18):
            await router.client.chat(str(session))
    ranks = [[seen.headers.get("x-data-parallel-rank") for seen in part.seen] for part in parts]
    assert [set(one) for one in ranks] == [{"0", "1"}, {"0", "1", "2"}, {None}]
    for part, seen in zip(parts, ranks, strict=True):
        turns = [one.headers["x-session-id"] for one in part.seen]
        assert turns[: len(turns) // 2] == turns[len(turns) // 2 :]
        assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as one, suppress(OSError):
        one.bind(("::1", 0))
        return True
    return False


async def test_addresses_may_be_of_ipv6() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    program = "import typer, schedloom.router.commands as c; typer.run(c.route)"
    async with AsyncExitStack() as stack:
        p, d = [await stack.enter_async_context(served(asgi(one), "::1")) for one in (prefiller(), decoder())]
        options = ["--prefill", p, "--decode", d, "--host", "::1", "--port", "0"]
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *options, stdout=PIPE)
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        match = re.search(r"http://\[::1\]:\d+", line)
        assert match is not None, line
        async with httpx2.AsyncClient(base_url=match[0], timeout=PATIENCE_SECONDS) as client:
            answer = await client.post("/v1/completions", json={"model": "fake-model", "prompt": "hello"})
        assert (answer.status_code, answer.headers["x-schedloom-decision"]) == (200, "pd")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 0
        await process.communicate()
