"""The main job: agentic sessions through the router, each answer held against an undisturbed engine."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from schedloom.demo import counters
from schedloom.demo.client import Client
from schedloom.demo.conversation import Session
from schedloom.demo.engines import HOST, Engine, EngineSpec, Fleet, Runner, free_ports
from schedloom.demo.facts import Facts, Turn
from schedloom.demo.service import Service

TURNS = 4
DECODER_CACHE_BYTES = 66 << 20
"""Holds about 11,200 tokens of the demo's model: all sessions, but not all of them and ``FLOOD`` too."""
FLOOD_PROMPTS = 3
FLOOD_CHARACTERS = 4000

APPEND_ON = {"scheduler_config": {"decoder_append_prefill_enable": True}}

Say = Callable[[str], None]


@dataclass(frozen=True)
class System:
    """The running parts, and a client of each."""

    prefiller: Engine
    decoder: Engine
    router: Client
    reference: Client
    direct: Client


@contextmanager
def running_system(runner: Runner, model: Path, logs: Path, say: Say) -> Iterator[System]:
    """A Prefiller, a Decoder, the router before them, and a single undisturbed engine. Nothing outlives the context.

    Raises EngineFailed or ServiceFailed when a part does not come up.
    """
    specs = engine_specs(runner)

    def ready(engine: Engine, seconds: float) -> None:
        say(f"{engine.spec.name} ready after {seconds:.0f} s")

    with Fleet(specs, model, logs, on_ready=ready) as fleet:
        engines = fleet.engines
        prefiller, decoder, reference = engines["prefiller"], engines["decoder"], engines["reference"]
        with started_router(prefiller, decoder, logs) as url:
            say(f"router ready at {url}")
            yield System(prefiller, decoder, Client(url), Client(reference.url), Client(decoder.url))


def engine_specs(runner: Runner) -> list[EngineSpec]:
    """Each role with its own configuration; the reference engine knows nothing of schedloom or of other engines."""
    ports = free_ports(5)
    ours = {"VLLM_PLUGINS": "schedloom,schedloom_cpu_engine"}
    prefiller = EngineSpec("prefiller", ports[0], "producer", ports[1], runner, environment=ours)
    decoder = EngineSpec(
        "decoder", ports[2], "consumer", ports[3], runner, environment=ours,
        kv_cache_bytes=DECODER_CACHE_BYTES, additional_config=APPEND_ON,
    )  # fmt: skip
    stock = {"VLLM_PLUGINS": "schedloom_cpu_engine"}
    alone = EngineSpec(
        "reference", ports[4], runner=runner, environment=stock, arguments=("--no-enable-prefix-caching",)
    )
    return [prefiller, decoder, alone]


@contextmanager
def started_router(prefiller: Engine, decoder: Engine, logs: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    url = f"http://{HOST}:{port}"
    command = [
        *(sys.executable, "-m", "schedloom", "route", "--host", HOST, "--port", str(port)),
        *("--prefill", prefiller.url, "--decode", decoder.url, "--enable-decoder-append-prefill"),
    ]
    with Service("router", command, logs, ready=lambda: _answers(f"{url}/ready")):
        yield url


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def play(system: System, runner: Runner, say: Say, on_turn: Callable[[Turn], None]) -> Facts:
    """Every session turn by turn, one request without a session, and one turn after its KV was evicted."""
    facts = Facts(runner)

    def take(session: Session, turn: int, promised: str) -> None:
        facts.turns.append(take_turn(system, session, turn, promised))
        on_turn(facts.turns[-1])

    sessions = [Session.opened("A", "header"), Session.opened("B", "body"), Session.opened("C", "header")]
    for turn in range(1, TURNS):
        for session in sessions:
            take(session, turn, "pd" if turn == 1 else "append")
    take(Session.opened("-", "none", characters=1200), 1, "pd")
    for session in sessions[:-1]:
        take(session, TURNS, "append")
    say("filling the Decoder's cache with other work, so that the KV of session C is evicted")
    evict(system)
    take(sessions[-1], TURNS, "fallback")
    return facts


def take_turn(system: System, session: Session, turn: int, promised: str) -> Turn:
    before = counters.read(system.prefiller.url), counters.read(system.decoder.url)
    answer = system.router.ask(session)
    decoder = counters.read_after(system.decoder.url, before[1], answer.prompt_tokens) - before[1]
    prefiller = counters.read(system.prefiller.url) - before[0]
    undisturbed = system.reference.stream(session.messages, {}, {})
    session.continue_with(answer.text, turn)
    return Turn(
        session=session.name,
        turn=turn,
        promised_route=promised,
        route=answer.decision,
        prompt_tokens=answer.prompt_tokens,
        reused_tokens=int(decoder.from_cache),
        computed_on_decoder=int(decoder.computed),
        computed_on_prefiller=int(prefiller.computed),
        ttft_ms=round(answer.ttft_seconds * 1000, 1),
        exact=answer.token_ids == undisturbed.token_ids and answer.prompt_tokens == undisturbed.prompt_tokens,
    )


def evict(system: System) -> None:
    """Unmarked requests sent straight to the Decoder, as many as it takes to reuse its whole cache."""
    for index in range(FLOOD_PROMPTS):
        system.direct.stream(Session.opened(f"other {index}", "none", FLOOD_CHARACTERS).messages, {}, {}, 1)
