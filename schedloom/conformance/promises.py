"""What the built-in policies promise, seen from outside: from what an engine schedules, not from what a policy says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from schedloom.conformance.cells import Cell
from schedloom.conformance.laboratory import Engine, Report
from schedloom.conformance.ledger import Accuse, Entry, Ledger
from schedloom.core.views import ReusableKV

PATIENCE = 12
"""Steps of one phase in a row while the other waits, and steps with streams in which no prompt gets on."""

OLD_NEWS_STEPS = 4
"""The same, once what the other rank said is too old to count."""

HOLD_STEPS = 30
"""Steps without anything scheduled on account of a full rank: longer than the bound on that."""

APPEND_REASON = "no_usable_prefix"
"""Why append_prefill turns a request away; another policy may do so for reasons of its own."""


class Promises:
    """Watches the policies of one cell. ``settings`` are theirs, by name."""

    def __init__(
        self,
        cell: Cell,
        engine: Engine,
        ledger: Ledger,
        accuse: Accuse,
        events: Counter[str],
        settings: Mapping[str, Any],
    ) -> None:
        self._cell, self._engine, self._ledger, self._accuse = cell, engine, ledger, accuse
        self._events, self._settings = events, settings
        checks: dict[str, Callable[[Report], None]] = {
            "phase_separation": self._phases,
            "tpot_guard": self._pace,
            "offload_restore": self._saves,
            "kv_lease": self._leases,
            "balance": self._held,
            "batch_job_aware": self._count_jobs,
        }
        self._checks = [check for name, check in checks.items() if name in settings]
        self._crowd = Crowd()
        self._disturbed = self._throttled = False
        self._in_a_row = {True: 0, False: 0}
        self._left_out: dict[str, int] = {}
        self._without_prefill = 0
        self._held_back = 0
        self._held_by_old_news = 0
        self._last = 0.0
        self._jobs: set[str] = set()
        self._jobs_seen: set[str] = set()
        self._ended: dict[int, float] = {}
        self._tables: dict[str, set[int]] = {}

    def note_blocks(self, report: Report) -> None:
        """To be told before the step's outputs: a request may have been given blocks in the step in which it ends."""
        for name, tables in report.blocks.items():
            before = set() if name in report.admitted else self._tables.get(name, set())
            self._tables[name] = before.union(*tables)

    def after_step(self, report: Report, disturbed: bool, throttled: bool) -> None:
        self._disturbed, self._throttled = disturbed, throttled
        for check in self._checks:
            check(report)

    def admitted(self, entry: Entry, computed: int, now: float) -> None:
        """``entry`` is given KV for the first time, with ``computed`` tokens that it need not compute."""
        if "append_prefill" in self._settings and entry.order.marked:
            rule = self._settings["append_prefill"]
            if rule.is_hopeless(entry.length, ReusableKV(computed, 0)):
                self._accuse("APP-1", f"{entry.name} was admitted with {computed} tokens of {entry.length}")
        # Whoever waits for a transfer was admitted when that began.
        fresh = entry.order.transfer != "receive"
        if "batch_job_aware" in self._settings and fresh and entry.order.job_class is not None:
            self._batch_job(entry)
        if "balance" in self._settings and fresh and self._crowd.surely_holds(now, self._settings["balance"]):
            self._accuse("BAL-1", f"{entry.name} was admitted while another rank is full")
        if self._orders and fresh:
            self._in_turn(entry)

    def rejected(self, entry: Entry, reason: str, resident: int) -> None:
        """``entry`` was turned away by an engine that did nothing else, and holds ``resident`` tokens of it."""
        rule = self._settings.get("append_prefill") if reason == APPEND_REASON else None
        if rule is not None and not rule.is_hopeless(entry.length, ReusableKV(resident, 0)):
            self._accuse("APP-1", f"{entry.name} was turned away although {resident} of its tokens are there")

    def ended(self, entry: Entry, now: float) -> None:
        blocks = self._tables.pop(entry.name, set())
        if entry.order.session is not None:
            self._ended |= dict.fromkeys(blocks, now)

    def told(self, running: int, kv_usage: float, now: float) -> None:
        """Another rank has told its load."""
        if settings := self._settings.get("balance"):
            full = running >= self._cell.max_num_seqs or kv_usage >= settings.full_kv_usage
            self._events["another rank was full"] += full and bool(self._ledger.open)
            self._crowd.tell(full, now, settings.stale_seconds)

    # Phases

    def _phases(self, report: Report) -> None:
        if self._disturbed:
            self._in_a_row = {True: 0, False: 0}
        if not report.left:
            return
        settings = self._settings["phase_separation"]
        prefills = [name for name, left in report.left.items() if left > 1]
        if prefills and len(prefills) < len(report.left):
            self._accuse("PHA-1", f"{prefills[0]} is prefilled in one batch with streams")
        elif not prefills and len(report.left) > max(settings.decode_batch_buckets, default=len(report.left)):
            self._accuse("PHA-1", f"{len(report.left)} requests decode in a batch")
        tokens = sum(report.scheduled[name] for name in prefills)
        self._events["prefill step" if prefills else "decode step"] += 1
        if tokens > max(settings.prefill_token_buckets, default=tokens):
            self._accuse("PHA-1", f"{tokens} tokens are prefilled in a batch")
        self._alternate(bool(prefills), report)
        self._turns(report)

    def _alternate(self, prefill: bool, report: Report) -> None:
        """A step that decodes because vLLM puts prefill off takes no turn from prefill, and does not end its wait."""
        waits = len(report.streams) if prefill else report.prefilling
        taken = prefill or not self._throttled
        self._in_a_row[not prefill] = 0
        self._in_a_row[prefill] = self._in_a_row[prefill] + taken if waits and not self._disturbed else 0
        if self._in_a_row[prefill] > PATIENCE:
            self._accuse(
                "PHA-2", f"one phase had {PATIENCE} steps in a row while {waits} requests waited for the other"
            )

    def _turns(self, report: Report) -> None:
        waiting = set(report.streams) - report.scheduled.keys()
        self._left_out = {name: self._left_out.get(name, 0) + 1 for name in waiting if not self._put_off}
        name = max(waiting, key=lambda name: self._left_out.get(name, 0), default="")
        if self._left_out.get(name, 0) > PATIENCE and not report.preemptions:
            self._accuse("PHA-2", f"{name} was left out of {PATIENCE} batches in a row")

    @property
    def _put_off(self) -> bool:
        """Whether whoever waits may do so on somebody else's account than a policy's."""
        return self._disturbed or self._throttled

    # Pace

    def _pace(self, report: Report) -> None:
        tokens = sum(report.scheduled[name] for name, left in report.left.items() if left > 1)
        least = self._settings["tpot_guard"].min_chunk_tokens
        self._events["prefill beside streams"] += bool(report.streams and tokens)
        if report.streams and not report.preemptions and tokens > least:
            self._accuse("TPG-1", f"{tokens} tokens are prefilled beside {len(report.streams)} streams")
        if self._cell.roomy and not report.streams and set(self._settings) == {"tpot_guard"}:
            self._uncut(report)
        self._prompts_get_on(report)

    def _uncut(self, report: Report) -> None:
        cut = [name for name, left in report.left.items() if report.scheduled[name] < left]
        alone = all(left > 1 for left in report.left.values())
        if cut and alone and sum(report.scheduled.values()) < self._cell.token_budget:
            self._accuse("TPG-1", f"the prompt of {cut[0]} is cut although nothing is streamed")

    def _prompts_get_on(self, report: Report) -> None:
        stuck = report.streams and report.prefilling and not any(left > 1 for left in report.left.values())
        if self._put_off or report.preemptions or "phase_separation" in self._settings or not stuck:
            self._without_prefill = 0
            return
        self._without_prefill += 1
        if self._without_prefill > PATIENCE:
            self._accuse("TPG-1", f"no prompt got on in {PATIENCE} steps")

    # Other ranks

    def _held(self, report: Report) -> None:
        """In an empty engine somebody is admitted, sooner or later, and at once when the news is old."""
        settings = self._settings["balance"]
        self._crowd.step(report.now, settings.stale_seconds, self._ledger.open.keys() - self._tables.keys())
        asked_lately = report.now - self._last < settings.stale_seconds
        self._last = report.now
        idle = not report.scheduled and not self._put_off and not self._cell.offload and self._somebody_may_start()
        if not idle or not asked_lately or not self._crowd.full:
            self._held_back = self._held_by_old_news = 0
            return
        self._held_back += 1
        self._held_by_old_news += not self._crowd.lately(report.now, settings.stale_seconds)
        if self._held_back > HOLD_STEPS or self._held_by_old_news > OLD_NEWS_STEPS:
            self._accuse("BAL-1", f"nobody was admitted for {self._held_back} steps of an empty engine")

    def _somebody_may_start(self) -> bool:
        return bool(self._ledger.open) and not self._engine.transfers and not self._engine.num_running

    # Queues

    def _batch_job(self, entry: Entry) -> None:
        active = len(self._active_jobs() - {entry.name})
        most = self._settings["batch_job_aware"].max_active
        self._events["batch job beside batch jobs"] += bool(active)
        if active >= most:
            self._accuse("BAT-1", f"{entry.name} was admitted beside {active} batch jobs where {most} may run")

    def _count_jobs(self, report: Report) -> None:
        """Those that may have held KV at some moment of this step: some end in it, some are admitted and end."""
        entries = self._ledger.entries
        scheduled = {name for name in report.scheduled if entries[name].order.job_class is not None}
        before, self._jobs = self._jobs, self._active_jobs()
        self._jobs_seen = before | self._jobs | scheduled

    def _active_jobs(self) -> set[str]:
        jobs = [entry.name for entry in self._ledger.open.values() if entry.order.job_class is not None]
        return {name for name in jobs if any(self._engine.blocks_of(name))}

    def _in_turn(self, entry: Entry) -> None:
        """Nobody whose turn surely was before this one's still waits."""
        earliest, _ = self._turn(entry)
        for other in self._ledger.open.values():
            if other.held or other is entry or other.order.transfer == "receive" or other.order.adapter:
                continue
            self._events["admitted before another"] += 1
            if self._turn(other)[1] < earliest and not self._may_be_put_off(other):
                self._accuse("ORD-1", f"{entry.name} was admitted before {other.name}, whose turn it was")
                return

    def _turn(self, entry: Entry) -> tuple[float, float]:
        """The earliest and the latest moment at which it can count as having arrived."""
        arrival, delay = entry.order.arrival, 0.0
        if "batch_job_aware" in self._settings and entry.order.job_class is not None:
            delay = self._settings["batch_job_aware"].max_wait_seconds
        if (rule := self._settings.get("short_request_first")) and entry.length > rule.short_tokens:
            surely = not self._cell.prefix_caching and entry.order.transfer != "receive"
            return arrival + rule.max_wait_seconds * surely, arrival + rule.max_wait_seconds
        return arrival + delay, arrival + delay

    def _may_be_put_off(self, entry: Entry) -> bool:
        """A local attempt may have been turned away, and a batch job waits where as many run, or are to come back, as
        may.
        """
        if entry.order.marked:
            return True
        if entry.order.job_class is None or "batch_job_aware" not in self._settings:
            return False
        others = [other for other in self._ledger.open.values() if other is not entry and other.preempted]
        jobs = self._jobs_seen | {other.name for other in others if other.order.job_class is not None}
        return len(jobs) >= int(self._settings["batch_job_aware"].max_active)

    @property
    def _orders(self) -> bool:
        return bool({"batch_job_aware", "short_request_first"} & set(self._settings)) and not self._cell.priority

    # KV

    def _saves(self, report: Report) -> None:
        least = self._settings["offload_restore"].min_saved_tokens
        self._events["saved"] += len(report.saved)
        for name, tokens in report.saved:
            if tokens < least:
                self._accuse("OFF-1", f"{tokens} tokens of {name} were saved where {least} are worth it")

    def _leases(self, report: Report) -> None:
        settings = self._settings["kv_lease"]
        if len(report.refreshed) > settings.max_share * self._cell.num_blocks:
            self._accuse("LEA-1", f"{len(report.refreshed)} blocks were refreshed in a step")
        self._events["refreshed"] += len(report.refreshed)
        for block in report.refreshed:
            ended = self._ended.get(block)
            if ended is None or report.now - ended > settings.ttl_seconds:
                why = "of no session" if ended is None else f"{report.now - ended:.0f} s after the turn"
                self._accuse("LEA-1", f"block {block} was refreshed: {why}")
                return


class Crowd:
    """What another rank has said of its load, and since when it has been full without a break. Those who may
    have been held still count as held: nobody need have been asked since.
    """

    def __init__(self) -> None:
        self.full = False
        self._may_be_held: set[str] = set()
        self._since = self._last = float("-inf")
        self._quiet_before = False

    def tell(self, full: bool, now: float, stale: float) -> None:
        if full and not self.full:
            self._quiet_before = now - self._last > 2 * stale and not self._may_be_held
            self._since = now
        if self.full or full:
            self._last = now
        self.full = full

    def step(self, now: float, stale: float, without_blocks: set[str]) -> None:
        self._may_be_held &= without_blocks
        if self.full and self.lately(now, stale):
            self._may_be_held |= without_blocks

    def lately(self, now: float, stale: float) -> bool:
        return now - self._last < stale

    def surely_holds(self, now: float, settings: Any) -> bool:
        """Whether a rank that was asked about anybody would hold: said lately, and not for so long that it may not."""
        lately = self.lately(now, settings.stale_seconds)
        return self.full and self._quiet_before and lately and now - self._since < settings.max_hold_seconds
