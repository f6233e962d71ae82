"""A5, B4: requests that a real Decoder hands back are continued through a real Prefiller, token for token.

The Decoder's pool is too small for what it serves at once, so that it preempts; what it hands back travels through
the router and NIXL, often several times. Every answer is held against that of an engine with room for all: the
Prefiller, asked directly, under a salt of its own so that it shares no KV with what it computed for others.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from schedloom.adapters.engine.trace import FILE_VARIABLE
from schedloom.core.continuation import CONTINUABLE_KEY, RESUME_KEY, HandBack
from schedloom.core.wire import PROTOCOL_VERSION
from schedloom.demo.engines import HOST, Engine, EngineSpec, Fleet, Runner, free_ports
from schedloom.demo.model import cached_model
from schedloom.demo.service import Service
from tests.router.fakes import Seen
from tests.router.recomputing import PROMPT, TOKENS, recomputing

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

HAND_BACKS = int(os.environ.get("SCHEDLOOM_HAND_BACKS", "4"))
"""Chains of hand-back, prefill and resumption to reach on each runner; the deeper tier asks for 72."""

RUNNERS = ["v1", pytest.param("v2", marks=pytest.mark.deep)]
WAVES = 30
AT_ONCE = 24
PROMPT_CHARACTERS = 110
ANSWER = 80
BLOCKS = 104
"""Of the 24 x 7 that a wave comes to need; a block has 32 tokens, and a token is a character."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
POLICIES = [{"name": "recompute", "min_returned_tokens": 1}, {"name": "append_prefill"}]


@dataclass
class Asked:
    """One request, and what became of it."""

    path: str
    body: dict[str, Any]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    completion_tokens: int = 0
    raw: list[dict[str, Any]] = field(default_factory=list)

    def take(self, part: dict[str, Any]) -> None:
        """A chunk, or the whole answer."""
        assert "error" not in part, part
        self.raw.append(part)
        self.completion_tokens = (part.get("usage") or {}).get("completion_tokens", 0)
        for choice in part["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            self.text += said.get("content") or ""
            self.token_ids += choice.get("token_ids") or []
            self.finishes += [choice["finish_reason"]] if choice.get("finish_reason") else []

    @property
    def answer(self) -> tuple[Any, ...]:
        return self.text, self.token_ids, self.finishes, self.completion_tokens


def requests(wave: int) -> list[Asked]:
    """Chat and completions, streamed and not, each with a prompt of its own."""
    return [request(wave * AT_ONCE + number) for number in range(AT_ONCE)]


def request(number: int) -> Asked:
    said = f"{number}: " + "abcdefghij klmnopqr "[number % 7 :] * 20
    prompt = said[:PROMPT_CHARACTERS]
    body: dict[str, Any] = {"model": "demo", "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    if number % 2:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if number % 4 < 2:
        return Asked(CHAT, body | {"messages": [{"role": "user", "content": prompt}]})
    return Asked(COMPLETIONS, body | {"prompt": prompt})


async def ask_all(url: str, asked: list[Asked], **more: Any) -> list[Asked]:
    """All at once."""
    async with httpx2.AsyncClient(base_url=url, timeout=1200) as client:
        return list(await asyncio.gather(*[ask(client, one, more) for one in asked]))


async def ask(client: httpx2.AsyncClient, asked: Asked, more: dict[str, Any]) -> Asked:
    told = Asked(asked.path, asked.body)
    async with client.stream("POST", asked.path, json=asked.body | more) as response:
        if not asked.body.get("stream"):
            told.take(json.loads(await response.aread()))
        else:
            async for part in parts(response):
                told.take(part)
    return told


async def parts(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    ended = False
    async for line in response.aiter_lines():
        assert not (ended and line), line
        if line == "data: [DONE]":
            ended = True
        elif line:
            yield json.loads(line.removeprefix("data: "))
    assert ended, "a stream without its end"


@dataclass
class System:
    """``trace`` is where the Decoder writes its decisions."""

    router: str
    decoder: Engine
    prefiller: Engine
    trace: Path

    def undisturbed(self, asked: list[Asked]) -> list[tuple[Any, ...]]:
        return [one.answer for one in asyncio.run(ask_all(self.prefiller.url, asked, cache_salt="undisturbed"))]

    def counted(self, name: str) -> int:
        lines = httpx2.get(f"{self.router}/metrics", timeout=60).text.splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"schedloom_router_{name}")]
        return int(sum(map(float, values)))

    def decided(self) -> Counter[tuple[str, int]]:
        """How often which decision, by how much output the request had."""
        events = [json.loads(line) for line in self.trace.read_text().splitlines()]
        return Counter((event["decision"], event.get("output_tokens", 0)) for event in events)


@contextmanager
def running(runner: Runner, folder: Path, connector: str = "NixlConnector") -> Iterator[System]:
    trace = folder / "decisions.jsonl"
    trace.touch()
    ports = free_ports(5)
    with Fleet(specs(runner, ports, trace, connector), cached_model(), folder) as fleet:
        prefiller, decoder = fleet.engines["prefiller"], fleet.engines["decoder"]
        url = f"http://{HOST}:{ports[4]}"
        command = [sys.executable, "-m", "schedloom", "route", "--port", str(ports[4])]
        command += ["--prefill", prefiller.url, "--decode", decoder.url, "--enable-decoder-append-prefill"]
        with Service("router", command, folder, ready=lambda: answers(f"{url}/ready")):
            yield System(url, decoder, prefiller, trace)


def specs(runner: Runner, ports: list[int], trace: Path, connector: str) -> list[EngineSpec]:
    ours = {"VLLM_PLUGINS": "schedloom,schedloom_cpu_engine", FILE_VARIABLE: str(trace)}
    common: Any = {"environment": ours, "connector": connector}
    few = (f"--num-gpu-blocks-override={BLOCKS}", f"--max-num-seqs={AT_ONCE}")
    policies = {"scheduler_config": {"policies": POLICIES}}
    return [
        EngineSpec("prefiller", ports[0], "producer", ports[1], runner, **common),
        EngineSpec(
            "decoder",
            ports[2],
            "consumer",
            ports[3],
            runner,
            additional_config=policies,
            arguments=few,
            max_model_len=512,
            **common,
        ),
    ]


def answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


@pytest.fixture(scope="module", params=RUNNERS)
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(request.param, tmp_path_factory.mktemp(request.param)) as system:
        yield system


def test_what_is_handed_back_goes_on_exactly(system: System) -> None:
    go_on_exactly(system, map(requests, range(WAVES)), HAND_BACKS)


def go_on_exactly(system: System, waves: Iterable[list[Asked]], wanted: int) -> int:
    """Asks wave by wave until so many hand-backs are reached and proven; returns how many requests that took."""
    served = 0
    for asked in waves:
        told = asyncio.run(ask_all(system.router, asked))
        assert [one.answer for one in told] == system.undisturbed(asked)
        served += len(told)
        if system.counted("handed_back_total") >= wanted:
            break
    until_all_is_counted(system)
    handed_back = proven_chains(system)
    assert handed_back >= wanted
    print(f"{handed_back} hand-backs in {served} requests, all answers exact")
    return served


def until_all_is_counted(system: System) -> None:
    """An answer leaves the router a moment before it is counted."""
    for _ in range(100):
        if system.counted("handed_back_total") == system.counted("continuations_total"):
            return
        time.sleep(0.1)


def proven_chains(system: System) -> int:
    """Hand-backs that the Decoder decided, each with the resumption of a request of as much output."""
    decided = system.decided()
    handed_back = Counter({size: count for (what, size), count in decided.items() if what == "HANDED_BACK"})
    resumed = Counter({size: count for (what, size), count in decided.items() if what == "RESUME"})
    assert handed_back == resumed
    assert handed_back.total() == system.counted("handed_back_total") == system.counted("continuations_total")
    assert system.counted('continuations_total{result="continued"}') == handed_back.total()
    return handed_back.total()


def test_the_fake_decoder_speaks_like_the_real_one(system: System) -> None:
    """The tests of the router stand on a fake: all that it says when it hands back and continues, real ones say too."""
    told = asyncio.run(ask_all(system.decoder.url, requests(WAVES), vllm_xargs=MARKS))
    given_back = [one for one in told if hand_back_of(one) is not None]
    assert given_back
    for one in given_back:
        hand_back = hand_back_of(one)
        assert hand_back is not None and list(hand_back.output)[: len(one.token_ids)] == one.token_ids
        marks = {**MARKS, RESUME_KEY: hand_back.ticket.written()}
        again = asyncio.run(ask_all(system.decoder.url, [one], vllm_xargs=marks))[0]
        assert [again.answer] == system.undisturbed([one])
        assert shape(faked(one, MARKS)) <= shape(one.raw)
        assert shape(faked(one, {RESUME_KEY: FAKE_TICKET})) <= shape(again.raw)


MARKS = {CONTINUABLE_KEY: PROTOCOL_VERSION}
FAKE_TICKET = HandBack("", PROMPT, TOKENS[:5]).ticket.written()


def hand_back_of(told: Asked) -> HandBack | None:
    reasons = [choice.get("stop_reason") for part in told.raw for choice in part["choices"]]
    return next(filter(None, map(HandBack.read, reasons)), None)


def faked(asked: Asked, marks: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a fake Decoder's answer; it hands back after five tokens."""
    body = json.dumps(asked.body | {"vllm_xargs": marks}).encode()
    answer = asyncio.run(recomputing(0, 5).answer(Seen(asked.path, {}, body)))
    said = b"".join(step for step in answer.steps if isinstance(step, bytes))
    if not asked.body.get("stream"):
        return [json.loads(said)]
    return [json.loads(event.removeprefix("data: ")) for event in said.decode().split("\n\n")[:-2]]


def shape(parts: list[dict[str, Any]]) -> set[str]:
    """Which fields are told, by their paths."""
    return {path for part in parts for path in paths(part, "")}


def paths(value: Any, before: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, f"{before}.{key}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from paths(inner, before)
    elif value is not None:
        yield before
