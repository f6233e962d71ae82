"""What it gains to keep a session on its Decoder, and what it costs where load is uneven.

The real router and its real policies on a simulated clock, in front of engines that are no more than this: a Prefiller
computes prompts one after the other; a Decoder computes what a turn appends, one after the other too, then produces
tokens the slower the more requests run, and keeps sessions' KV in a cache that forgets the least recently used; so does
a Prefiller where it has a cache. The numbers say what a rule does to such a fleet, and nothing of any hardware. The
same seed gives the same numbers.

    python -m benchmarks.stickiness
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, Final

from schedloom.core.reuse import UsablePrefixRule
from schedloom.core.wire import CONTRACT_PATH, LOCAL_ATTEMPT_KEY, REJECTION_PREFIX, EngineContract, Role
from schedloom.router.app import RouterApp
from schedloom.router.http.upstream import ConnectFailed, UpstreamRequest
from schedloom.router.laboratory.client import Client
from schedloom.router.laboratory.clock import simulate
from schedloom.router.laboratory.engines import SimulatedResponse
from schedloom.router.settings import router_settings

PREFILL_TOKENS_PER_SECOND: Final = 8_000.0
APPEND_TOKENS_PER_SECOND: Final = 16_000.0
SECONDS_PER_TOKEN: Final = 0.02
SECONDS_PER_TOKEN_AND_NEIGHBOUR: Final = 0.0005
DECODER_KV_TOKENS: Final = 2_000_000
BYTES_PER_TOKEN: Final = 1


@dataclass(frozen=True)
class Workload:
    """Sessions that each take their turns one after the other, thinking between them; times are in seconds.

    Lengths are in tokens, and medians of log-normal distributions. ``late_decoders`` of the Decoders come after
    ``late_seconds``: until then all sessions are at home on the others. From ``restart_at`` on turns come to a router
    that knows nothing of those before. Without ``appends`` no Decoder prefills anything itself.
    """

    sessions: int = 300
    turns: int = 8
    first: int = 10_000
    appended: int = 800
    output: int = 230
    think: float = 11.0
    arrival: float = 90.0
    prefillers: int = 12
    decoders: int = 4
    late_decoders: int = 0
    late_seconds: float = 60.0
    prefiller_kv_tokens: int = 0
    restart_at: float | None = None
    appends: bool = True


@dataclass
class Engine:
    """One engine of the model, with room for ``kv_tokens``. ``busy_until`` is when its prefill is free again."""

    origin: str
    role: Role
    kv_tokens: int
    comes_at: float = 0.0
    appends: bool = True
    busy_until: float = 0.0
    running: int = 0
    held: OrderedDict[str, int] = field(default_factory=OrderedDict)
    computed: int = 0

    @property
    def contract(self) -> EngineContract:
        features = ["append_prefill"] if self.role is Role.CONSUMER and self.appends else []
        return EngineContract(epoch="e", role=self.role, models=["m"], block_size=16, features=features)

    async def compute(self, tokens: int, rate: float) -> None:
        """Wait for whoever came before, then for these tokens."""
        now = asyncio.get_running_loop().time()
        self.busy_until = max(self.busy_until, now) + tokens / rate
        self.computed += tokens
        await asyncio.sleep(self.busy_until - now)

    def keep(self, session: str, tokens: int) -> None:
        self.held[session] = tokens
        self.held.move_to_end(session)
        while sum(self.held.values()) > self.kv_tokens:
            self.held.popitem(last=False)


class ModelUpstream:
    """Engines that take the time that they would."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = {engine.origin: engine for engine in engines}
        self.rule = UsablePrefixRule()

    def heard_at(self, origin: str) -> float:
        return 0.0

    def give_up(self, origin: str) -> int:
        return 0

    def forget(self, origin: str) -> None:
        return None

    async def close(self) -> None:
        return None

    async def send(self, request: UpstreamRequest) -> SimulatedResponse:
        engine = self.engines[request.origin]
        if asyncio.get_running_loop().time() < engine.comes_at:
            raise ConnectFailed(request.origin)
        if request.path == CONTRACT_PATH:
            return _said(engine.contract.model_dump(mode="json"))
        body = json.loads(request.body)
        prompt = len(body["messages"][-1]["content"]) // BYTES_PER_TOKEN
        session = dict(request.headers)[b"x-session-id"].decode()
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            await engine.compute(prompt - min(prompt, engine.held.get(session, 0)), PREFILL_TOKENS_PER_SECOND)
            engine.keep(session, prompt)
            return _said({"kv_transfer_params": {"do_remote_prefill": True}})
        return await self._decode(engine, session, prompt, body)

    async def _decode(self, engine: Engine, session: str, prompt: int, body: Mapping[str, Any]) -> SimulatedResponse:
        if (body.get("vllm_xargs") or {}).get(LOCAL_ATTEMPT_KEY) == 1:
            reused = min(prompt, engine.held.get(session, 0))
            if not self.rule.allows(prompt, reused):
                return _stream("stop", REJECTION_PREFIX + "no_usable_prefix", 0.0, tokens=0)
            await engine.compute(prompt - reused, APPEND_TOKENS_PER_SECOND)
        engine.running += 1
        seconds = body["max_tokens"] * (SECONDS_PER_TOKEN + SECONDS_PER_TOKEN_AND_NEIGHBOUR * engine.running)
        asyncio.get_running_loop().call_later(seconds, self._done, engine, session, prompt + body["max_tokens"])
        return _stream("length", None, seconds / 2, tokens=body["max_tokens"])

    @staticmethod
    def _done(engine: Engine, session: str, tokens: int) -> None:
        engine.running -= 1
        engine.keep(session, tokens)


def _said(value: Any) -> SimulatedResponse:
    return SimulatedResponse([json.dumps(value).encode()], b"application/json", 200, 0.0)


def _stream(finish: str, stop_reason: str | None, wait: float, tokens: int) -> SimulatedResponse:
    """Its first token at once and the rest in two parts, each ``wait`` seconds after the one before."""
    end = {"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": stop_reason}
    words = [{"choices": [{"index": 0, "delta": {"content": "word"}, "finish_reason": None}]}] if tokens else []
    events = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in [*words, {"choices": [end]}]]
    return _Timed([*events, b"data: [DONE]\n\n"], wait)


class _Timed(SimulatedResponse):
    """Its first part comes at once."""

    def __init__(self, steps: Sequence[bytes], wait: float) -> None:
        super().__init__(list(steps), b"text/event-stream", 200, 0.0)
        self._later = wait

    async def read(self) -> bytes:
        step = await super().read()
        self._wait = self._later
        return step


@dataclass
class Result:
    """What one run of a workload came to. Seconds to the first token and to the end are those of follow-up turns,
    ``openings`` are seconds to the first token of first turns. ``after`` are those of the follow-up turns that are the
    first of their sessions after the restart, ``kept`` and ``rejected`` the ways that they took.
    """

    first_tokens: list[float] = field(default_factory=list)
    openings: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    kept: int = 0
    rejected: int = 0
    ends: list[float] = field(default_factory=list)
    finished: float = 0.0
    served: int = 0
    appended: int = 0
    prefilled: int = 0


def p50(seconds: Sequence[float]) -> float:
    return quantiles(seconds, n=100)[49]


def p95(seconds: Sequence[float]) -> float:
    return quantiles(seconds, n=100)[94]


Rule = Sequence[Mapping[str, Any]]
"""Policies, as they stand in a configuration."""

NOT_STICKY: Final[Rule] = ()


def sticky(max_lead: int) -> Rule:
    return [{"name": "session_owner", "max_lead": max_lead}]


class Run:
    """One workload under one rule."""

    def __init__(self, workload: Workload, rule: Rule, seed: int = 0) -> None:
        self.workload = workload
        self.rule = rule
        self.chance = random.Random(seed)
        late = workload.decoders - workload.late_decoders
        self.engines = [
            Engine(f"http://p{n}:1", Role.PRODUCER, workload.prefiller_kv_tokens) for n in range(workload.prefillers)
        ]
        self.engines += [
            Engine(
                f"http://d{n}:1",
                Role.CONSUMER,
                DECODER_KV_TOKENS,
                workload.late_seconds if n >= late else 0.0,
                workload.appends,
            )
            for n in range(workload.decoders)
        ]
        self.known: set[str] = set()
        """The sessions that the router has served."""
        self.restarted = False
        self.result = Result()

    async def play(self) -> Result:
        loop = asyncio.get_running_loop()
        before = self.app = await self._router()
        restart = asyncio.create_task(self._restart())
        await asyncio.gather(*[self._session(number) for number in range(self.workload.sessions)])
        restart.cancel()
        for app in {before, self.app}:
            await app.close()
        self.result.finished = loop.time()
        self.result.prefilled = sum(engine.computed for engine in self.engines if engine.role is Role.PRODUCER)
        return self.result

    async def _router(self) -> RouterApp:
        workers = [{"url": engine.origin} for engine in self.engines]
        settings = router_settings({"workers": workers, "policies": self.rule, "max_body_bytes": 2**26})
        clock = asyncio.get_running_loop().time
        app = RouterApp(settings, ModelUpstream(self.engines), clock=clock, chance=random.Random(0))
        await app.start()
        return app

    async def _restart(self) -> None:
        """Turns that are under way end where they began."""
        if self.workload.restart_at is not None:
            await asyncio.sleep(self.workload.restart_at)
            self.app = await self._router()
            self.known.clear()
            self.restarted = True

    async def _session(self, number: int) -> None:
        chance, load = random.Random(self.chance.random()), self.workload
        await asyncio.sleep(chance.uniform(0, load.arrival))
        tokens = _about(chance, load.first)
        for turn in range(load.turns):
            output = _about(chance, load.output)
            await self._turn(f"s{number}", tokens, output, is_first=turn == 0)
            tokens += output + _about(chance, load.appended)
            await asyncio.sleep(chance.expovariate(1 / load.think))

    async def _turn(self, session: str, tokens: int, output: int, *, is_first: bool) -> None:
        client, loop = Client(self.app), asyncio.get_running_loop()
        goes_on, begun = self.restarted and session not in self.known, loop.time()
        self.known.add(session)
        times = [self.result.openings if is_first else self.result.first_tokens]
        times += [self.result.after] if goes_on and not is_first else []

        def note() -> None:
            for one in times:
                one.append(loop.time() - begun)

        client.on_start = note
        answer = [] if is_first else [{"role": "assistant", "content": ""}]
        messages = [*answer, {"role": "user", "content": "x" * (tokens * BYTES_PER_TOKEN)}]
        body = {"model": "m", "messages": messages, "max_tokens": output, "stream": True}
        received = await client.post("/v1/chat/completions", body, {"X-Session-ID": session})
        assert received.status == 200, received.body
        self._count(received.decision, loop.time() - begun, is_first=is_first, goes_on=goes_on)

    def _count(self, decision: str, seconds: float, *, is_first: bool, goes_on: bool) -> None:
        result = self.result
        result.served += 1
        result.appended += decision == "append"
        if is_first:
            return
        result.ends.append(seconds)
        result.kept += decision == "append" and goes_on
        result.rejected += decision == "fallback" and goes_on


def _about(chance: random.Random, median: int) -> int:
    return max(1, round(chance.lognormvariate(0, 0.6) * median))


def measure(workload: Workload, rule: Rule, seed: int = 0) -> Result:
    return simulate(Run(workload, rule, seed).play())


NO_BOUND: Final = 100_000
POWER_OF_TWO: Final[Rule] = [{"name": "power_of_two"}]
LEADS: Final = {
    "not sticky": NOT_STICKY,
    **{str(lead): sticky(lead) for lead in (0, 4, 16, 64)},
    "no bound": sticky(NO_BOUND),
}


def rendezvous(max_prefill_lead: int) -> Rule:
    return [{"name": "rendezvous", "max_prefill_lead": max_prefill_lead}, *POWER_OF_TWO]


PLACES: Final = {
    "power_of_two": POWER_OF_TWO,
    **{f"rendezvous, {lead}": rendezvous(lead) for lead in (0, 2, 4)},
    "rendezvous, no bound": rendezvous(NO_BOUND),
}

SCENARIOS: Final = {
    "all Decoders from the start": Workload(),
    "three of four Decoders come after a minute": Workload(late_decoders=3),
}
RESTART: Final = Workload(restart_at=120.0)
CACHING: Final = Workload(appends=False, prefiller_kv_tokens=500_000)


def main() -> None:
    for name, workload in SCENARIOS.items():
        print(f"\n{name}\n\n max_lead     TTFT p50   p95   turn p50   p95   all served  appended  prefilled on P")
        for label, rule in LEADS.items():
            result = measure(workload, rule)
            print(
                f" {label:<11}{p50(result.first_tokens):9.2f}{p95(result.first_tokens):7.2f}"
                f"{p50(result.ends):10.1f}{p95(result.ends):7.1f}{result.finished:10.0f} s"
                f"{result.appended / result.served:10.0%}{result.prefilled / 1e6:9.1f} M tokens"
            )
            sys.stdout.flush()
    _show_places("the router restarts after two minutes", RESTART, sticky(16))
    _show_places("Prefillers keep 500,000 tokens each, Decoders prefill nothing", CACHING, NOT_STICKY)


def _show_places(name: str, workload: Workload, others: Rule) -> None:
    """What policies that place sessions do beside ``others``."""
    print(
        f"\n{name}\n\n first turns          TTFT p50   p95   follow-ups p50   p95   prefilled on P   after the restart"
    )
    for label, rule in PLACES.items():
        result = measure(workload, [*others, *rule])
        columns = [
            f" {label:<21}{p50(result.openings):8.2f}{p95(result.openings):7.2f}",
            f"{p50(result.first_tokens):16.2f}{p95(result.first_tokens):7.2f}",
            f"{result.prefilled / 1e6:9.1f} M tokens",
        ]
        if result.after:
            columns.append(f"{p50(result.after):9.2f}{p95(result.after):7.2f}")
            columns.append(f"{result.kept:5} kept{result.rejected:5} turned away")
        print("".join(columns))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
