"""The catalogue: what must hold, who finds out, and what must have happened for silence to mean anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Invariant:
    """``statement`` must hold; ``oracle`` is how it is found out; of ``events`` each must have happened in a cell in
    which the invariant is to count as passed; ``tiers`` are where it is looked at."""

    id: str
    statement: str
    oracle: str
    events: tuple[str, ...]
    tiers: tuple[str, ...] = ("T2",)


_OF_AXES = ("zeroed", "draft accepted", "draft rejected", "block behind the window")
"""Each is asked for only in cells of which an axis brings it about."""

_ALL = (
    Invariant(
        "TOK-1",
        "Emitted token ids equal those of the same request served alone, without policies",
        "the model's token is a hash of all KV it reads; the reference is computed from the exact prefix",
        ("token", "resumed", *_OF_AXES),
    ),
    Invariant(
        "OUT-1",
        "Each request ends in exactly one terminal outcome, and nothing follows it",
        "ledger of outcomes, checked at each output and when the engine is empty",
        ("finished", "aborted"),
    ),
    Invariant(
        "OUT-2",
        "No token is lost, duplicated or reordered across preemption, recovery and transfer",
        "ledger of (request, position); the number of tokens at the end is the number asked for",
        ("finished", "resumed"),
    ),
    Invariant(
        "OUT-3",
        "Nothing is replayed after output: a request that has emitted a token never starts over, and is not rejected",
        "ledger of positions",
        ("finished", "resumed"),
    ),
    Invariant(
        "REJ-1",
        "A rejection reaches only a marked request that holds nothing, has no output and leaves nothing behind",
        "ledger of marks, admissions and outputs",
        ("rejected", "admitted local attempt"),
        ("T1", "T2"),
    ),
    Invariant(
        "RET-1",
        "A request is handed back only if its tokens alone continue it, after its output has arrived, while another "
        "holds KV, and never by a reset",
        "ledger of marks, preemptions and samples, looked at when a request is handed back",
        ("handed back",),
    ),
    Invariant(
        "RET-2",
        "A hand-back names its client's prompt and all that the client has, and who continues it tells that again",
        "ledger of tokens, against the hand-back and against the first output of the continuation",
        ("handed back", "continued"),
    ),
    Invariant(
        "KV-1",
        "After every step each block has exactly the owners that its reference count says, and is free without any",
        "walk over all block tables, deferred frees and the free queue",
        ("token",),
    ),
    Invariant(
        "KV-2",
        "No block is owned for a request that no longer exists, and an empty engine owns none",
        "walk over block tables after each step and when the engine is empty",
        ("aborted while waiting", "aborted while running"),
    ),
    Invariant(
        "KV-3",
        "Every KV that is read is what was written for the reader's exact prefix",
        "the 64-bit state that the model read, against the state of the exact prefix; what a preempted request leaves "
        "in the prefix cache, against what it computed",
        ("prefix hit",),
    ),
    Invariant(
        "KV-4",
        "A transfer's source stays until it was read, and its destination belongs to the request until it was written",
        "ownership of both ends when a transfer settles; content of the source",
        ("transfer settled", "aborted while in transfer"),
    ),
    Invariant(
        "ISO-1",
        "Requests that differ in cache salt or adapter never share blocks, and requests that agree do",
        "who wrote each block that a request joins with",
        ("salted hit", "adapter hit"),
    ),
    Invariant(
        "PAU-1",
        "While all is paused nothing is scheduled; while the new are, nobody is admitted who holds no KV",
        "every step of a pause",
        ("paused",),
    ),
    Invariant(
        "LIVE-1",
        "With all faults healed, the engine drains within a bounded number of steps",
        "step counter while draining, and while nothing is scheduled",
        ("drained",),
        ("T1", "T2"),
    ),
    Invariant(
        "LIVE-2",
        "Preempting a request frees its blocks at once: no request is preempted whose blocks are fenced",
        "free and deferred blocks before and after each preemption",
        ("preempted",),
    ),
    Invariant(
        "LIVE-3",
        "No step of the engine raises, and no hook of a policy does",
        "any exception out of the engine, or out of a hook",
        ("token",),
        ("T1", "T2"),
    ),
    Invariant(
        "FAIR-1",
        "No request starves: later ones overtake it a bounded number of times",
        "overtake counter of every request that waits to be admitted for the first time",
        ("contention",),
        ("T1", "T2"),
    ),
    Invariant(
        "BUD-1",
        "Token and sequence budgets are never exceeded",
        "sums over each step",
        ("full batch",),
    ),
    Invariant(
        "IDEM-1",
        "Ending a request that has ended, and resetting an empty cache, change nothing and never raise",
        "the acts are done twice, the bookkeeping compared",
        ("ended twice",),
    ),
    Invariant(
        "OBS-1",
        "Published decisions equal the ledger: each rejection is published once, with its reason",
        "decision log against the ledger",
        ("rejected",),
    ),
    Invariant(
        "APP-1",
        "append_prefill: a local attempt is admitted if and only if enough of its prompt is there, and little is left",
        "the tokens that it joins with; of one turned away by a quiet engine, those that are resident",
        ("admitted local attempt", "rejected in a quiet engine"),
    ),
    Invariant(
        "BAL-1",
        "balance: while another rank says that it is full nobody new is admitted, within the bound on that",
        "what the other rank says, its age, and who is admitted meanwhile",
        ("another rank was full",),
    ),
    Invariant(
        "BAT-1",
        "batch_job_aware: no more batch jobs are admitted at a time than may be",
        "the batch jobs that hold KV whenever another is admitted",
        ("batch job beside batch jobs",),
    ),
    Invariant(
        "ORD-1",
        "short_request_first, batch_job_aware: whose turn is first is admitted first",
        "the moment from which each counts, worked out from its arrival, its length and its class",
        ("admitted before another",),
    ),
    Invariant(
        "PHA-1",
        "phase_separation: no batch mixes prefill and decode, or is larger than the largest compiled",
        "the tokens that each scheduled request had to compute",
        ("prefill step", "decode step"),
    ),
    Invariant(
        "PHA-2",
        "phase_separation: neither phase waits for long while the other has every step",
        "steps of one phase in a row while somebody waits for the other",
        ("prefill step", "decode step"),
    ),
    Invariant(
        "TPG-1",
        "tpot_guard: a step with streams prefills no more than it may and prompts get on; without any nothing is cut",
        "prefill tokens beside streams, and steps in a row without any",
        ("prefill beside streams",),
    ),
    Invariant(
        "OFF-1",
        "offload_restore: only KV that is worth it is saved",
        "the computed tokens of each request that is saved",
        ("saved",),
    ),
    Invariant(
        "LEA-1",
        "kv_lease: only the KV of a session's last turn is put off from eviction, for so long and so much of the pool",
        "the blocks that are refreshed, who held them, and when that ended",
        ("refreshed",),
    ),
    Invariant(
        "COMP-1",
        "Where no policy has anything to say, scheduling equals the engine's own, step for step",
        "the same script on the engine's own scheduler, outputs compared",
        ("compared",),
    ),
    Invariant(
        "ANS-1",
        "Policies answer what a hook may be answered",
        "the type of every answer, and the sign of every limit",
        ("token",),
        ("T1",),
    ),
    Invariant(
        "DET-1",
        "The same policies decide the same on the same schedule, in whatever order they are asked",
        "every answer and every step of a second run in which all are asked in the reverse order",
        ("token",),
        ("T1", "T2"),
    ),
    Invariant(
        "SHADOW-1",
        "Policies in shadow change nothing",
        "every step of a run in shadow, against one without policies",
        ("token",),
        ("T1",),
    ),
    Invariant(
        "FB-1",
        "Falling back is bounded: no request is sent to engines more often than its way through the fleet allows",
        "count of dispatches of every client's request",
        ("answered",),
        ("R1", "R2"),
    ),
    Invariant(
        "OWN-1",
        "session_owner: a local attempt goes to the session's owner, within the bound on its lead, and only where it "
        "can be turned away; what cannot be split goes there too. With rendezvous, a follow-up turn whose owner is not "
        "known may be tried where it can be turned away",
        "what engines are sent, against the sessions that the router keeps and the load of its fleet",
        ("append",),
        ("R1",),
    ),
    Invariant(
        "COMP-2",
        "Every set of policies is accepted and then holds every invariant, or is refused with names and a reason",
        "composition of every pair and triple, and of the whole set",
        ("composed",),
        ("T0",),
    ),
)

INVARIANTS = {invariant.id: invariant for invariant in _ALL}
