"""An engine under test: acts are done to it, and everything it does is held against the ledger and the oracles."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Iterable
from functools import singledispatchmethod
from pathlib import Path
from typing import Any

from schedloom.conformance import script
from schedloom.conformance.cells import Cell
from schedloom.conformance.chain import Chain
from schedloom.conformance.laboratory import Laboratory, Order, Output
from schedloom.conformance.ledger import ABORTED, Entry, Ledger
from schedloom.conformance.oracles import Oracles
from schedloom.conformance.verdicts import Violation
from schedloom.core.composition import PolicySet

SLACK_STEPS = 200
"""Steps beyond the work itself that an engine may take to drain."""


class Broken(Exception):
    """An invariant does not hold; the bench has the violations."""


class Bench:
    """Raises Broken from the act during which the first violation came to light. What follows would mean nothing."""

    def __init__(
        self,
        laboratory: Laboratory,
        cell: Cell,
        policies: PolicySet | None,
        faults: Iterable[type] = (),
        chain: Chain | None = None,
    ) -> None:
        self.cell = cell
        self.chain = chain or Chain()
        self.engine = laboratory.build(cell, self.chain, policies, faults)
        self.ledger = Ledger(self.chain, cell.max_model_len, self._accuse)
        self.oracles = Oracles(cell, self.engine, self.ledger, self._accuse)
        self.script: list[script.Act] = []
        self.violations: list[Violation] = []
        self.schedule: list[dict[str, int]] | None = None
        self.published: Counter[str] = Counter()
        self.steps = 0
        self._squeezed = False
        self._clock = 0.0
        self._quiet: tuple[str, dict[str, Any]] | None = None

    @property
    def events(self) -> Counter[str]:
        return self.oracles.events

    def close(self) -> None:
        self.engine.close()

    def do(self, act: script.Act) -> None:
        """Raises Broken."""
        self.script.append(act)
        if not isinstance(act, script.Step | script.Synchronise):
            self._quiet = None
        try:
            self._do(act)
        except Broken:
            raise
        except Exception as error:
            self._accuse("LIVE-3", f"{type(error).__name__}: {error}"[:300] + _place(error))
        if self.violations:
            raise Broken("; ".join(f"{found.invariant}: {found.message}" for found in self.violations))

    def _accuse(self, invariant: str, message: str) -> None:
        self.violations.append(Violation(invariant, message, self.steps))

    @singledispatchmethod
    def _do(self, act: script.Act) -> None:
        raise NotImplementedError(act)

    @_do.register
    def _arrive(self, act: script.Arrive) -> None:
        name = request_name(act.number)
        if name in self.ledger.entries:
            return
        self._clock += 1.0
        order = Order(
            request_id=name,
            prompt=self._prompt(act),
            max_tokens=act.max_tokens,
            marked=act.marked,
            transfer=act.transfer,
            salt=act.salt,
            priority=act.priority,
            arrival=self._clock,
            fast=act.fast,
            job_class=act.job_class,
        )
        self.oracles.salted |= act.salt is not None
        self._note_quiet(order)
        self.ledger.enter(order)
        self.engine.add(order)

    def _prompt(self, act: script.Arrive) -> list[int]:
        room = self.cell.max_model_len - 1
        history: list[int] = []
        parent = None if act.parent is None else self.ledger.entries.get(request_name(act.parent))
        if parent is not None:
            history = self.conversation(parent)[: act.keep]
        own = random.Random(act.number)
        head = [own.randrange(1, self.chain.vocabulary) for _ in history[: act.head]]
        fresh = [own.randrange(1, self.chain.vocabulary) for _ in range(max(act.fresh, 1))]
        return (head + history[len(head) : room - 1] + fresh)[:room]

    def _note_quiet(self, order: Order) -> None:
        """A local attempt that comes to an empty engine: if it is turned away, the books must be as they are now."""
        quiet = order.marked and not self.engine.has_work
        self._quiet = (order.request_id, self.engine.bookkeeping()) if quiet else None

    def _compare_quiet(self, request_id: str) -> None:
        if self._quiet is None or self._quiet[0] != request_id or request_id not in self.ledger.rejections:
            return
        now = self.engine.bookkeeping()
        for what, before in self._quiet[1].items():
            if now[what] != before:
                self._accuse("REJ-1", f"the rejection of {request_id} changed the engine's {what}")
        self.events["rejected in a quiet engine"] += 1

    def conversation(self, entry: Entry) -> list[int]:
        """A request's prompt and its whole right answer, delivered or not."""
        tokens = list(entry.order.prompt) + entry.tokens
        state = entry.state
        while len(tokens) < len(entry.order.prompt) + entry.limit:
            token = self.chain.next_token(state)
            state = self.chain.extend(state, len(tokens), (token,))
            tokens.append(token)
        return tokens

    @_do.register
    def _step(self, act: script.Step) -> None:
        for _ in range(act.count):
            self._one_step()
            if self.violations:
                return

    def _one_step(self) -> None:
        report = self.engine.step()
        self.steps += 1
        if self.schedule is not None:
            self.schedule.append(dict(report.scheduled))
        for name in report.counted:
            self.ledger.entries[name].counted = True
        for output in report.outputs or ():
            self._deliver(output)
        self.oracles.after_step(report, self._squeezed)
        if len(self.ledger.open) > self.engine.num_running >= self.cell.max_num_seqs:
            self.events["contention"] += 1

    def _deliver(self, output: Output) -> None:
        self.ledger.deliver(output)
        self.events["token"] += len(output.tokens)
        if output.finish_reason is not None:
            self._compare_quiet(output.request_id)
            self.events["rejected" if output.request_id in self.ledger.rejections else "finished"] += 1

    @_do.register
    def _abort(self, act: script.Abort) -> None:
        name = request_name(act.number)
        entry = self.ledger.open.get(name)
        if entry is None:
            return
        self.events[f"aborted while {_PHASES.get(self.engine.phase(name) or '', 'finished')}"] += 1
        self.events["aborted"] += 1
        self.engine.abort(name)
        self.ledger.close(entry, ABORTED)
        if act.twice:
            self._unchanged("ended again", lambda: self.engine.abort(name))

    def _unchanged(self, what: str, act: object) -> None:
        before = self.engine.bookkeeping()
        try:
            act()  # type: ignore[operator]
        except Exception as error:
            self._accuse("IDEM-1", f"{what}: {type(error).__name__}: {error}")
        if self.engine.bookkeeping() != before:
            self._accuse("IDEM-1", f"{what}: it changed the engine's books")
        self.events["ended twice"] += 1

    @_do.register
    def _settle(self, act: script.Settle) -> None:
        self._settle_name(request_name(act.number), act.failed)

    def _settle_name(self, name: str, failed: bool) -> None:
        if name not in self.engine.transfers:
            return
        entry = self.ledger.entries[name]
        entry.transfer_failed |= failed
        entry.held = True
        complaint = self.engine.settle(name, failed)
        if complaint:
            self._accuse("KV-4", f"{name}: {complaint}")
        self.events["transfer failed" if failed else "transfer settled"] += 1

    @_do.register
    def _squeeze(self, act: script.Squeeze) -> None:
        self._squeezed |= self.engine.squeeze(act.blocks) > 0
        self.events["squeezed"] += 1

    @_do.register
    def _relax(self, act: script.Relax) -> None:
        self.engine.relax()
        self._squeezed = False

    @_do.register
    def _reset(self, act: script.Reset) -> None:
        try:
            self.engine.reset_prefix_cache(act.running, act.connector)
        except RuntimeError:
            # vLLM's own refusal: blocks are held for a transfer, or fenced by a step in flight.
            self.events["reset refused"] += 1
        self.events["reset"] += 1

    @_do.register
    def _synchronise(self, act: script.Synchronise) -> None:
        self.engine.synchronise()

    @_do.register
    def _drain(self, act: script.Drain) -> None:
        self._relax(script.Relax())
        for _ in range(self._patience()):
            for name in self.engine.transfers:
                self._settle_name(name, failed=False)
            if not self.engine.has_work or self.violations:
                break
            self._one_step()
        if not self.violations:
            self._quiesce()

    def _patience(self) -> int:
        tokens = sum(len(entry.order.prompt) + entry.limit for entry in self.ledger.open.values())
        return SLACK_STEPS + 4 * tokens

    def _quiesce(self) -> None:
        self.oracles.count_blocks()
        if self.engine.has_work:
            self._accuse("LIVE-1", f"not drained: {sorted(self.engine.known_requests())[:5]} are left")
        for name in self.ledger.open:
            self._accuse("OUT-1", f"{name} never ended")
        owned = sum(1 for count in self.engine.references() if count)
        if owned and not self.engine.has_work:
            self._accuse("KV-2", f"{owned} blocks are owned in an empty engine")
        for name in self.engine.known_requests():
            self._accuse("KV-2", f"{name} is still known to the empty engine")
        self._compare_published()
        self.events["drained"] += 1

    def _compare_published(self) -> None:
        """Decisions on requests that were aborted meanwhile had no effect, and may be published or not."""
        for decision in self.engine.published:
            if decision["decision"] == "REJECT":
                self.published[f"{decision['request_id']}: {decision['reason']}"] += 1
        for name, reason in self.ledger.rejections.items():
            times = self.published[f"{name}: {reason}"]
            if times != 1:
                self._accuse("OBS-1", f"the rejection of {name} ({reason}) was published {times} times")
        for line in self.published:
            name = line.partition(":")[0]
            if name not in self.ledger.rejections and self.ledger.entries[name].outcome != ABORTED:
                self._accuse("OBS-1", f"a rejection of {name} was published and never happened")


_PHASES = {
    "waiting": "waiting",
    "running": "running",
    "preempted": "preempted",
    "transfer": "in transfer",
}


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({Path(frame.filename).name}:{frame.lineno}, in {frame.name})"


def request_name(number: int) -> str:
    return f"r{number}"
