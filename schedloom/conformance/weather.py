"""Random schedules: a seed decides what kind of weather it is, and then, act by act, what happens to the engine."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from schedloom.conformance import applicability, script
from schedloom.conformance.bench import Bench, number_of, request_name
from schedloom.conformance.cells import Cell
from schedloom.conformance.troubles import Troubles

Transfer = Literal["", "receive", "send"]

SEEDED = 0.15
"""The share of requests whose seed forbids handing them back, where some may be."""

AIMED_SEED = 1_000_000
"""From here on seeds go through the weather that aims at some events, and no other."""


@dataclass(frozen=True, slots=True)
class Weather:
    """Probabilities of each kind of act, and the load in requests at a time. What is longest or shortest is in tokens;
    ``continuable`` is the share of requests that carry the mark, where some may be handed back. ``local``: nothing is
    transferred; ``want``: whatever is free is taken away, again and again; ``calm``: no troubles;
    ``loyal``: who continues a conversation has its salt and its adapter."""

    load: int
    arrival: float
    abort: float
    squeeze: float
    reset: float
    catch_up: float
    transfer_failure: float
    settle: float
    fast: float
    marked: float
    follow_up: float
    salts: int
    longest: int
    shortest_prompt: int = 1
    shortest_answer: int = 1
    continuable: float = 0.7
    local: bool = False
    want: bool = False
    calm: bool = False
    loyal: bool = False

    @classmethod
    def of(cls, rng: random.Random, cell: Cell, climate: Mapping[str, Any]) -> Weather:
        often = rng.choice((0.0, 0.02, 0.1, 0.3))
        drawn = cls(
            load=rng.choice((1, 3, cell.max_num_seqs, 2 * cell.max_num_seqs)),
            arrival=rng.choice((0.3, 0.6, 0.95)),
            abort=rng.choice((0.02, 0.05, 0.2)),
            squeeze=often * rng.random(),
            reset=rng.choice((0.0, 0.0, 0.02)),
            catch_up=rng.choice((0.0, 0.1, 0.5)),
            transfer_failure=rng.choice((0.0, 0.1, 0.5)),
            settle=rng.choice((0.05, 0.3, 0.8)),
            fast=rng.choice((0.0, 0.0, 0.5)),
            marked=rng.choice((0.0, 0.3, 0.7)),
            follow_up=rng.choice((0.2, 0.6, 0.9)),
            salts=rng.choice((0, 0, 2)),
            longest=rng.choice((4, 16, 60)),
        )
        return replace(drawn, **climate)


CLIMATES: dict[str, dict[str, Any]] = {
    "changeable": {},
    "crowded and steady": {"load": 24, "arrival": 0.97, "abort": 0.0, "squeeze": 0.0, "reset": 0.0, "longest": 3},
    "one at a time": {"load": 1, "marked": 0.7, "squeeze": 0.0, "follow_up": 0.6, "longest": 16},
    "short of blocks": {"load": 8, "arrival": 0.9, "abort": 0.01, "longest": 60, "salts": 0},
    "tenants": {"salts": 2, "follow_up": 0.9, "load": 4, "abort": 0.02},
    "unsettled": {"reset": 0.05, "abort": 0.1, "catch_up": 0.3},
    "fast transfers": {"fast": 0.8, "abort": 0.15, "load": 12, "arrival": 0.9, "catch_up": 0.0, "longest": 30},
}
"""Weather that some invariants need and that chance alone would rarely bring. Seeds go through them in turn."""

_UNDISTURBED = {
    "calm": True, "abort": 0.0, "reset": 0.0, "transfer_failure": 0.0, "fast": 0.8, "marked": 0.0, "salts": 0
}  # fmt: skip
AIMED: dict[str, dict[str, Any]] = {
    "streams that stay": {
        **_UNDISTURBED, "load": 24, "arrival": 0.97, "squeeze": 0.0, "catch_up": 0.0, "follow_up": 0.0, "local": True,
        "shortest_prompt": 2, "longest": 3, "shortest_answer": 40
    },
    "want of blocks": {
        **_UNDISTURBED, "load": 12, "arrival": 0.95, "squeeze": 0.3, "want": True, "follow_up": 0.3,
        "longest": 20, "shortest_answer": 40, "continuable": 1.0
    },
    "tenants that come back": {
        **_UNDISTURBED, "load": 3, "arrival": 0.6, "squeeze": 0.0, "follow_up": 0.9, "local": True, "salts": 2,
        "longest": 20, "shortest_prompt": 9, "loyal": True
    },
}  # fmt: skip
"""Weather for what a cell has not met by chance: nothing is weaker for it, as an event must still happen."""

AIMS = {
    "salted hit": "tenants that come back",
    "adapter hit": "tenants that come back",
    "contention": "streams that stay",
    "full batch": "streams that stay",
    "preempted": "want of blocks",
    "resumed": "want of blocks",
    "saved": "want of blocks",
    "handed back": "want of blocks",
    "continued": "want of blocks",
}
"""The weather in which an event happens soonest."""


def aimed_seeds(missing: Iterable[str], seed: int) -> list[int]:
    """One for each weather that aims at some event of ``missing``; others for every ``seed``."""
    wanted = {AIMS[event] for event in missing if event in AIMS}
    first = AIMED_SEED + seed * len(AIMED)
    return [aimed for aimed in range(first, first + len(AIMED)) if climate_of(aimed) in wanted]


def climate_of(seed: int) -> str:
    climates = list(AIMED if seed >= AIMED_SEED else CLIMATES)
    return climates[seed % len(climates)]


class Forecast:
    """Draws acts for one bench. The same seed, cell and engine give the same acts."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self._bench = bench
        self._rng = random.Random(seed)
        climate = climate_of(seed)
        self.weather = Weather.of(self._rng, bench.cell, (CLIMATES | AIMED)[climate])
        self._troubles = Troubles(bench, random.Random(~seed), climate, self.weather.calm)
        self._arrived = 0
        self._squeezed = False
        self._hands_back = applicability.hands_back(bench.cell)

    def next(self) -> script.Act:
        if trouble := self._troubles.next():
            return trouble
        weather, rng = self.weather, self._rng
        open_requests = len(self._bench.ledger.open)
        if open_requests < weather.load and rng.random() < (weather.arrival if open_requests else 0.9):
            return self._arrival()
        if rng.random() < weather.abort and open_requests:
            return script.Abort(self._some_open(), twice=rng.random() < 0.2)
        if rng.random() < weather.squeeze or self._squeezed:
            return self._pressure()
        if rng.random() < weather.reset:
            return script.Reset(running=rng.random() < 0.6, connector=rng.random() < 0.5)
        if rng.random() < weather.settle and self._bench.engine.transfers:
            name = rng.choice(self._bench.engine.transfers)
            return script.Settle(number_of(name), failed=rng.random() < weather.transfer_failure)
        if rng.random() < weather.catch_up:
            return script.Synchronise()
        return script.Step(rng.choice((1, 1, 1, 3, 8)), throttled=self._troubles.throttles())

    def _some_open(self) -> int:
        return int(self._rng.choice(list(self._bench.ledger.open))[1:])

    def _pressure(self) -> script.Act:
        if self._squeezed and self._rng.random() < (0.03 if self.weather.want else 0.3):
            self._squeezed = False
            return script.Relax()
        if not self._squeezed or (self.weather.want and self._rng.random() < 0.7):
            self._squeezed = True
            most = self._bench.cell.num_blocks
            return script.Squeeze(most if self.weather.want else self._rng.randrange(1, most))
        return script.Step(1 if self.weather.want else self._rng.choice((1, 2, 5)))

    def _arrival(self) -> script.Arrive:
        rng, weather, cell = self._rng, self.weather, self._bench.cell
        number = self._arrived
        self._arrived += 1
        parent, keep = self._history(number)
        room = cell.max_model_len - keep
        fresh = max(rng.randrange(1, max(2, min(weather.longest, room - 8))), weather.shortest_prompt)
        marked = bool(cell.policies) and rng.random() < weather.marked
        drawn = script.Arrive(
            number,
            fresh,
            max_tokens=max(rng.randrange(1, weather.longest + 2), weather.shortest_answer),
            parent=parent,
            keep=keep,
            marked=marked,
            transfer="" if marked or weather.local else self._transfer(),
            salt=f"tenant {rng.randrange(weather.salts)}" if weather.salts and rng.random() < 0.7 else None,
            priority=rng.randrange(3) if cell.priority else 0,
            head=rng.randrange(1, 2 * cell.block_size) if keep and rng.random() < 0.15 else 0,
            job_class="batch" if rng.random() < 0.3 else None,
            fast=rng.random() < weather.fast,
            adapter=self._troubles.adapter() if weather.salts else 0,
            continuable=self._hands_back and rng.random() < weather.continuable,
            seeded=self._hands_back and rng.random() < SEEDED,
        )
        return self._as_before(drawn) if weather.loyal and parent is not None else drawn

    def _as_before(self, act: script.Arrive) -> script.Arrive:
        order = self._bench.ledger.entries[request_name(act.parent or 0)].order
        return replace(act, salt=order.salt, adapter=order.adapter, head=0)

    def _history(self, number: int) -> tuple[int | None, int]:
        """Continue an earlier conversation, mostly a recent one, whole or from somewhere inside it."""
        if not number or self._rng.random() > self.weather.follow_up:
            return None, 0
        parent = max(0, number - 1 - int(self._rng.expovariate(0.3)))
        entry = self._bench.ledger.entries.get(request_name(parent))
        if entry is None:
            return None, 0
        whole = len(entry.order.prompt) + entry.limit
        keep = whole if self._rng.random() < 0.5 else self._rng.randrange(1, whole + 1)
        return parent, min(keep, self._bench.cell.max_model_len - 16)

    def _transfer(self) -> Transfer:
        cell = self._bench.cell
        kinds: list[Transfer] = [""]
        if cell.receives:
            kinds += ["receive", "receive"]
        if cell.sends:
            kinds.append("send")
        return self._rng.choice(kinds)
