"""An engine under test: acts are done to it, and everything it does is held against the ledger and the oracles."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from schedloom.conformance import script, subjects
from schedloom.conformance.cells import Cell
from schedloom.conformance.chain import Chain
from schedloom.conformance.laboratory import Laboratory, Order, Output, Report
from schedloom.conformance.ledger import ABORTED, Entry, Ledger
from schedloom.conformance.oracles import Oracles
from schedloom.conformance.promises import Promises
from schedloom.conformance.verdicts import Violation, raised
from schedloom.core.composition import PolicySet

MOST_TIMES_RETURNED = 3
"""How often one request may be handed back."""

STEP_SECONDS = 0.05
"""How long a step takes on the laboratory's clock."""

SESSIONLESS = 4
"""One in so many conversations has no session."""

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
        self.events = self.oracles.events
        if policies is not None and policies.policies:
            settings = {policy.name: policy.settings for policy in subjects.plain(cell.policies)}
            self.oracles.promises = Promises(cell, self.engine, self.ledger, self._accuse, self.events, settings)
        self.script: list[script.Act] = []
        self.violations: list[Violation] = []
        self.schedule: list[dict[str, Any]] | None = None
        self.published: Counter[str] = Counter()
        self.published_hand_backs: Counter[str] = Counter()
        self.steps = 0
        self._squeezed = False
        self.paused = ""
        self._clock = 0.0
        self._quiet: tuple[str, dict[str, Any]] | None = None

    def close(self) -> None:
        self.engine.close()

    def do(self, act: script.Act) -> None:
        """Raises Broken."""
        self.script.append(act)
        if not isinstance(act, script.Step | script.Synchronise):
            self._quiet = None
        try:
            getattr(self, f"_{script.name_of(act)}")(act)
        except Broken:
            raise
        except Exception as error:
            self._accuse("LIVE-3", raised(error))
        if self.violations:
            raise Broken("; ".join(f"{found.invariant}: {found.message}" for found in self.violations))

    def _accuse(self, invariant: str, message: str) -> None:
        self.violations.append(Violation(invariant, message, self.steps))

    def _arrive(self, act: script.Arrive) -> None:
        name = request_name(act.number)
        if name in self.ledger.entries:
            return
        self._pass(1.0)
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
            adapter=act.adapter,
            session=self._session(act),
            job_class=act.job_class,
            continuable=act.continuable,
            seeded=act.seeded,
        )
        self.oracles.salted |= act.salt is not None or act.adapter > 0
        self._note_quiet(order)
        self.ledger.enter(order)
        self.engine.add(order)

    def _pass(self, seconds: float) -> None:
        self._clock += seconds
        self.engine.tick(seconds)

    def _session(self, act: script.Arrive) -> str | None:
        """That of the conversation which it continues; some conversations have none."""
        parent = None if act.parent is None else self.ledger.entries.get(request_name(act.parent))
        if parent is not None:
            return parent.order.session
        return f"session {act.number}" if act.number % SESSIONLESS else None

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
        if self.oracles.promises is not None:
            entry = self.ledger.entries[request_id]
            reason = self.ledger.rejections[request_id]
            self.oracles.promises.rejected(entry, reason, self.engine.resident(entry.order))

    def conversation(self, entry: Entry) -> list[int]:
        """A request's prompt and its whole right answer, delivered or not."""
        tokens = list(entry.order.prompt) + entry.tokens
        state = entry.state
        while len(tokens) < len(entry.order.prompt) + entry.limit:
            token = self.chain.next_token(state)
            state = self.chain.extend(state, len(tokens), (token,))
            tokens.append(token)
        return tokens

    def _step(self, act: script.Step) -> None:
        for _ in range(act.count):
            self._one_step(act.throttled)
            if self.violations:
                return

    def _one_step(self, throttled: bool = False) -> None:
        self._pass(STEP_SECONDS)
        report = self.engine.step(throttled)
        self.steps += 1
        if self.schedule is not None:
            self.schedule.append(_as_plain(report))
        for name in report.counted:
            self.ledger.entries[name].counted = True
        if self.oracles.promises is not None:
            self.oracles.promises.note_blocks(report)
        self._note_preemptions(report)
        for output in report.outputs or ():
            self._deliver(output)
        self._check_in_flight(report)
        self.oracles.after_step(report, self._squeezed, self.paused, throttled)
        self._continue_returned()
        if len(self.ledger.open) > self.engine.num_running >= self.cell.max_num_seqs:
            self.events["contention"] += 1

    def _note_preemptions(self, report: Report) -> None:
        for preemption in report.preemptions:
            entry = self.ledger.entries[preemption.request_id]
            entry.reset, entry.alone = preemption.reset, preemption.alone

    def _check_in_flight(self, report: Report) -> None:
        """Of what is handed back, all that was sampled has been told."""
        told = {output.request_id for output in report.outputs or () if output.tokens}
        for entry, _ in self.ledger.returned:
            if entry.name in report.sampled and entry.name not in told:
                self._accuse("RET-1", f"{entry.name} was handed back while output of it was in flight")

    def _continue_returned(self) -> None:
        """Do as the router does: send what was handed back again, at last without the mark."""
        returned, self.ledger.returned = self.ledger.returned, []
        for entry, handed in returned:
            self._clock += 1.0
            first, times = entry.order.request_id, entry.times_returned
            order = replace(
                entry.order,
                request_id=f"{first}.{times}",
                marked=False,
                transfer="receive" if self.cell.receives and times % 3 else "",
                arrival=self._clock,
                continuable=times < MOST_TIMES_RETURNED,
                ticket=handed.ticket.written(),
            )
            self.ledger.enter_again(entry, order)
            self.engine.add(order)
            self.events["handed back"] += 1

    def _deliver(self, output: Output) -> None:
        entry = self.ledger.entries.get(output.request_id)
        retells = entry is not None and entry.retells
        self.ledger.deliver(output)
        self.events["continued"] += retells and not entry.retells  # type: ignore[union-attr]
        self.events["token"] += len(output.tokens)
        if output.finish_reason is not None:
            self._compare_quiet(output.request_id)
            if entry is not None and self.oracles.promises is not None:
                self.oracles.promises.ended(entry, self._clock)
            self.events["rejected" if output.request_id in self.ledger.rejections else "finished"] += 1

    def _abort(self, act: script.Abort) -> None:
        name = request_name(act.number)
        entry = self.ledger.open.get(name)
        if entry is None:
            return
        self.events[f"aborted while {_PHASES.get(self.engine.phase(entry.name) or '', 'finished')}"] += 1
        self.events["aborted"] += 1
        self.engine.abort(entry.name)
        if self.oracles.promises is not None:
            self.oracles.promises.ended(entry, self._clock)
        self.ledger.close(entry, ABORTED)
        if act.twice:
            self._unchanged("ended again", lambda: self.engine.abort(entry.name))

    def _unchanged(self, what: str, act: object) -> None:
        before = self.engine.bookkeeping()
        try:
            act()  # type: ignore[operator]
        except Exception as error:
            self._accuse("IDEM-1", f"{what}: {raised(error)}")
        if self.engine.bookkeeping() != before:
            self._accuse("IDEM-1", f"{what}: it changed the engine's books")
        self.events["ended twice"] += 1

    def _settle(self, act: script.Settle) -> None:
        entry = self.ledger.entries.get(request_name(act.number))
        if entry is not None:
            self._settle_name(entry.name, act.failed)

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

    def _squeeze(self, act: script.Squeeze) -> None:
        self._squeezed |= self.engine.squeeze(act.blocks) > 0
        self.events["squeezed"] += 1

    def _relax(self, act: script.Relax) -> None:
        self.engine.relax()
        self._squeezed = False

    def _reset(self, act: script.Reset) -> None:
        try:
            self.engine.reset_prefix_cache(act.running, act.connector)
        except RuntimeError:
            # vLLM's own refusal: blocks are held for a transfer, or fenced by a step in flight.
            self.events["reset refused"] += 1
        self.events["reset"] += 1

    def _pause(self, act: script.Pause) -> None:
        self.paused = "PAUSED_NEW" if act.new_only else "PAUSED_ALL"
        self.engine.pause(self.paused)

    def _resume(self, act: script.Resume) -> None:
        self.paused = ""
        self.engine.pause("UNPAUSED")

    def _wait(self, act: script.Wait) -> None:
        self._pass(act.seconds)

    def _crowd(self, act: script.Crowd) -> None:
        self._pass(STEP_SECONDS)
        self.engine.crowd(act.running, act.kv_usage)
        if self.oracles.promises is not None:
            self.oracles.promises.told(act.running, act.kv_usage, self._clock)

    def _lose(self, act: script.Lose) -> None:
        for name in self.engine.transfers:
            self._settle_name(name, failed=True)

    def _silence(self, act: script.Silence) -> None:
        self.engine.silence(act.steps)

    def _synchronise(self, act: script.Synchronise) -> None:
        self.engine.synchronise()

    def _drain(self, act: script.Drain) -> None:
        self._relax(script.Relax())
        self._resume(script.Resume())
        self.engine.silence(0)
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
            if decision["decision"] == "HANDED_BACK":
                self.published_hand_backs[decision["request_id"]] += 1
        if self.published_hand_backs != self.ledger.hand_backs:
            published, happened = self.published_hand_backs.total(), self.ledger.hand_backs.total()
            self._accuse("OBS-1", f"{published} hand-backs were published, and {happened} happened")
        for name, reason in self.ledger.rejections.items():
            times = self.published[f"{name}: {reason}"]
            if times != 1:
                self._accuse("OBS-1", f"the rejection of {name} ({reason}) was published {times} times")
        for line in self.published:
            name = line.partition(":")[0]
            if name not in self.ledger.rejections and self.ledger.entries[name].outcome != ABORTED:
                self._accuse("OBS-1", f"a rejection of {name} was published and never happened")


def _as_plain(report: Report) -> dict[str, Any]:
    """All that a step did, in its order."""
    outputs = [(output.request_id, output.tokens, output.finish_reason) for output in report.outputs or ()]
    given = {name: [list(blocks) for blocks in tables] for name, tables in report.blocks.items()}
    return {
        "scheduled": list(report.scheduled.items()),
        "joined": list(report.admitted.items()),
        "blocks": given,
        "preempted": [preemption.request_id for preemption in report.preemptions],
        "outputs": outputs,
    }


_PHASES = {
    "waiting": "waiting",
    "running": "running",
    "preempted": "preempted",
    "transfer": "in transfer",
}


def request_name(number: int) -> str:
    return f"r{number}"


def number_of(name: str) -> int:
    """The number of a request by the engine's name for it, be it there for the first time or again."""
    return int(name[1:].partition(".")[0])
