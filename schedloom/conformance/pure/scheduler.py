"""A scheduler of pure Python: continuous batching, chunked prefill, a prefix cache, preemption, and every hook.

It follows the specifications of the hooks, not the code of an engine: what a policy may rely on is all that it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from schedloom.conformance.pure.asking import Asking
from schedloom.conformance.pure.pool import Pool, PoolFace
from schedloom.conformance.pure.requests import ModelRequest
from schedloom.core.decisions import Admission, Lane, Phase, Recovery, StepOutcome, StepPlan, Verdict
from schedloom.core.views import BatchReport, PeerLoad, RequestView, ReusableKV

BLOCK_SIZE = 4
NUM_BLOCKS = 72
MAX_RUNNING = 8
TOKEN_BUDGET = 48
STEP_SECONDS = 0.25


class View:
    """An EngineView of the model."""

    __slots__ = ("_pool_face", "_scheduler")

    def __init__(self, scheduler: ModelScheduler, acts: bool) -> None:
        self._scheduler = scheduler
        self._pool_face = PoolFace(scheduler.pool, scheduler.requests, acts)

    @property
    def now(self) -> float:
        return self._scheduler.now

    @property
    def block_size(self) -> int:
        return BLOCK_SIZE

    @property
    def num_decoding(self) -> int:
        return sum(request.tokens_left <= 1 for request in self._scheduler.running)

    @property
    def num_prefilling(self) -> int:
        return sum(request.tokens_left > 1 for request in self._scheduler.running)

    @property
    def prefill_throttled(self) -> bool:
        return False

    @property
    def last_batch(self) -> BatchReport:
        return self._scheduler.last_batch

    @property
    def pool(self) -> PoolFace:
        return self._pool_face

    @property
    def peers(self) -> Sequence[PeerLoad]:
        return tuple(self._scheduler.peers)

    def num_active(self, job_classes: Collection[str]) -> int:
        return sum(request.job_class in job_classes for request in self._scheduler.running)

    def reusable_kv(self, request: RequestView, enough: int | None = None) -> ReusableKV:
        blocks = self._scheduler.pool.prefix(self._scheduler.requests[request.request_id].prompt)
        return ReusableKV(len(blocks) * BLOCK_SIZE, 0)


@dataclass
class Batch:
    """A step in the making. ``phase`` is what it holds or may hold; None is both."""

    plan: StepPlan | None
    left: int = TOKEN_BUDGET
    phase: Phase | None = None
    scheduled: dict[str, int] = field(default_factory=dict)
    left_out: set[Phase] = field(default_factory=set)
    held: bool = False
    closed: set[Lane] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.phase = self.plan.phase if self.plan else None

    def allows(self, phase: Phase) -> bool:
        if self.phase in (None, Phase.EITHER, phase):
            return True
        self.left_out.add(phase)
        return False

    def add(self, request: ModelRequest, tokens: int, phase: Phase) -> None:
        self.scheduled[request.request_id] = tokens
        self.left -= tokens
        if self.phase is Phase.EITHER:
            self.phase = phase

    @property
    def report(self) -> BatchReport:
        return BatchReport(len(self.scheduled), Phase.PREFILL in self.left_out, Phase.DECODE in self.left_out)


class ModelScheduler:
    """``accuse`` is told of every broken invariant; ``acts`` is whether anything comes of what policies answer."""

    def __init__(self, asking: Asking, accuse: Callable[[str, str], None], acts: bool = True) -> None:
        self.asking, self._accuse = asking, accuse
        self.pool = Pool(NUM_BLOCKS, BLOCK_SIZE)
        self.requests: dict[str, ModelRequest] = {}
        self.waiting: list[ModelRequest] = []
        self.running: list[ModelRequest] = []
        self.peers: list[PeerLoad] = []
        self.events: Counter[str] = Counter()
        self.now = 0.0
        self.steps = 0
        self.last_batch = BatchReport()
        self.view = View(self, acts)
        self._arrived: list[ModelRequest] = []
        self._last_end: float | None = None

    # What happens to it

    def add(self, request: ModelRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self._arrived.append(request)

    def end(self, request: ModelRequest, outcome: str) -> None:
        self.asking.tell("request_finished", request.face(), self.view)
        for queue in (self.waiting, self.running, self._arrived):
            if request in queue:
                queue.remove(request)
        self.pool.give_back(request.blocks)
        request.blocks = []
        request.outcome = outcome
        self.events[outcome] += 1

    def step(self) -> dict[str, int]:
        """One step: the tokens that each request was given."""
        self.steps += 1
        self.now += STEP_SECONDS
        self.asking.tell("step_begin", self.view)
        batch = Batch(next((plan for _, plan in self.asking.ask("plan_step", self.view)), None))
        preempted = self._serve_running(batch)
        if not preempted:
            self._serve_waiting(batch)
        self.last_batch = batch.report
        self._screen_arrived()
        self._finish(batch)
        return batch.scheduled

    # Running requests

    def _serve_running(self, batch: Batch) -> bool:
        """Whether somebody was preempted."""
        before = self.events["preempted"]
        for request in self._in_turn(batch):
            if request in self.running:
                self._serve(request, batch, self._make_room)
        return self.events["preempted"] > before

    def _in_turn(self, batch: Batch) -> list[ModelRequest]:
        """Who may be served. Where not all can decode, those who have not for the longest time do."""
        bound = batch.plan.max_decodes if batch.plan else None
        decoding = [request for request in self.running if request.tokens_left <= 1]
        if bound is None or len(decoding) <= bound:
            return list(self.running)
        left_out = sorted(decoding, key=lambda request: request.served)[bound:]
        return [request for request in self.running if request not in left_out]

    def _serve(self, request: ModelRequest, batch: Batch, make_room: Callable[[ModelRequest, int], bool]) -> bool:
        phase = Phase.PREFILL if request.tokens_left > 1 else Phase.DECODE
        if not batch.allows(phase):
            return False
        tokens = min(request.tokens_left, batch.left)
        if phase is Phase.PREFILL and tokens:
            limits = [limit for _, limit in self.asking.ask("limit_tokens", request.face(), tokens, self.view)]
            tokens = min([tokens, *limits])
        if not tokens or not make_room(request, tokens):
            return False
        batch.add(request, tokens, phase)
        request.served = self.steps
        return True

    def _make_room(self, request: ModelRequest, tokens: int) -> bool:
        while not self._grow(request, tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _grow(self, request: ModelRequest, tokens: int) -> bool:
        needed = -(-(request.num_computed_tokens + tokens) // BLOCK_SIZE) - len(request.blocks)
        taken = self.pool.take(needed) if needed > 0 else []
        request.blocks += taken
        return len(taken) >= needed

    def _preempt(self, victim: ModelRequest) -> None:
        ways = next((ways for _, ways in self.asking.ask("recover", victim.face(), self.view)), ())
        self.events["saved"] += Recovery.OFFLOAD in ways
        self.running.remove(victim)
        self.pool.give_back(victim.blocks)
        victim.blocks = []
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting.insert(0, victim)
        self.events["preempted"] += 1

    # Waiting requests

    def _serve_waiting(self, batch: Batch) -> None:
        for request in self._queue():
            if not batch.left or len(self.running) == MAX_RUNNING:
                return
            if not self._is_shown(request, batch) or (request.is_fresh and not self._may_proceed(request, batch)):
                continue
            if not self._join(request, batch):
                return

    def _queue(self) -> list[ModelRequest]:
        for request in self.waiting:
            if request.lane is None:
                lanes = (lane for _, lane in self.asking.ask("queue_key", request.face(), self.view))
                request.lane = next(lanes, Lane(""))
        return sorted(self.waiting, key=_turn)

    def _is_shown(self, request: ModelRequest, batch: Batch) -> bool:
        return not request.is_fresh or not (batch.held or request.lane in batch.closed)

    def _may_proceed(self, request: ModelRequest, batch: Batch) -> bool:
        answer = self._judge(request, "admit")
        if answer.verdict is Verdict.REJECT and request.marked:
            self.end(request, "rejected")
            return False
        if answer.verdict is Verdict.HOLD:
            batch.held = True
        if answer.verdict is Verdict.DEFER and answer.whole_lane and request.lane:
            batch.closed.add(request.lane)
        return answer.verdict in (Verdict.ADMIT, Verdict.REJECT)

    def _judge(self, request: ModelRequest, hook: str) -> Admission:
        """The strictest answer. A rejection of a request without the router's mark has no effect, and is a fault."""
        answers = list(self.asking.ask(hook, request.face(), self.view))
        for policy, answer in answers:
            if answer.verdict is Verdict.REJECT and not request.marked:
                self._accuse("REJ-1", f"policy {policy} turns {request.request_id} away, which is no local attempt")
        given = (answer for _, answer in answers)
        strictest = max(given, key=lambda answer: (answer.verdict, answer.whole_lane), default=None)
        return strictest or Admission(Verdict.ADMIT)

    def _join(self, request: ModelRequest, batch: Batch) -> bool:
        """Whether the next waiting request is to be looked at."""
        shared = self.pool.prefix(request.tokens[: request.num_tokens])
        self.pool.share(shared)
        request.blocks, request.num_computed_tokens = shared, len(shared) * BLOCK_SIZE
        fresh = not (request.num_preemptions or request.num_output_tokens)
        if not self._serve(request, batch, self._grow):
            self.pool.give_back(shared)
            request.blocks, request.num_computed_tokens = [], 0
            return False
        self.waiting.remove(request)
        self.running.append(request)
        self.events["prefix hit"] += bool(shared)
        if fresh:
            self.events["admitted local attempt"] += request.marked
            self._count_overtakes(request)
        return True

    def _count_overtakes(self, request: ModelRequest) -> None:
        for other in self.waiting:
            if other.is_fresh and other.arrival < request.arrival:
                other.overtaken += 1
                self.events["overtaken"] += 1

    def _screen_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        for request in arrived:
            if not (request.marked and request in self.waiting and request.is_fresh):
                continue
            if self._judge(request, "screen").verdict is Verdict.REJECT:
                self.end(request, "rejected")

    # The end of a step

    def _finish(self, batch: Batch) -> None:
        for request_id, tokens in batch.scheduled.items():
            self._advance(self.requests[request_id], tokens)
        requests = len(batch.scheduled)
        prefill = sum(batch.scheduled.values()) - requests
        seconds = None if self._last_end is None else STEP_SECONDS
        self._last_end = self.now if self.running else None
        if requests:
            self.asking.tell("step_end", StepOutcome(requests, prefill, seconds), self.view)

    def _advance(self, request: ModelRequest, tokens: int) -> None:
        request.num_computed_tokens += tokens
        self.pool.remember(request)
        if request.num_computed_tokens < request.num_tokens:
            return
        request.num_output_tokens += 1
        self.events["token"] += 1
        if request.num_output_tokens == len(request.answer):
            self.end(request, "finished")


def _turn(request: ModelRequest) -> tuple[bool, float]:
    """Preempted requests go before all others, and before everybody goes who would have come first."""
    assert request.lane is not None
    return (not request.num_preemptions, 0.0 if request.num_preemptions else request.arrival + request.lane.delay)
