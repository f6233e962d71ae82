"""Every known-bad subject, the cell in which it is tried, and the invariant on which it must fail."""

from __future__ import annotations

from dataclasses import dataclass, replace

from schedloom.conformance.cells import Cell
from schedloom.conformance.mutants import (
    answers,
    blocks,
    guards,
    policies,
    recovery,
    requests,
    returning,
    routing,
    runners,
)
from schedloom.core.policy import Policy

_TIGHT = Cell()
_ASYNC = Cell(asynchronous=True, runner="v2")
_DECODER = Cell(role="consumer")
_ASYNC_DECODER = Cell(role="consumer", asynchronous=True, runner="v2")
_PREFILLER = Cell(role="producer")
_APPEND = Cell(role="consumer", policies=("append_prefill",))
_V2 = Cell(runner="v2")
ADAPTERS = Cell(variant="eagle", priority=True, asynchronous=True, runner="v2")
_OFFLOAD = Cell(offload=True, policies=("offload_restore",))
_RETURN = Cell(role="consumer", policies=("recompute",))
_ASYNC_RETURN = Cell(role="consumer", policies=("recompute",), asynchronous=True, runner="v2")


@dataclass(frozen=True, slots=True)
class Mutant:
    """``dies_on`` is the invariant whose oracle must accuse it; ``seed`` is where looking for that begins. ``tier`` is
    that of the router's policies, of which ``cell`` has the names."""

    fault: type
    dies_on: str
    cell: Cell
    seed: int = 0
    tier: str = ""

    @property
    def name(self) -> str:
        return self.fault.__name__

    @property
    def is_policy(self) -> bool:
        """Whether it is tried on the model of T1, and otherwise in its tier, or in T2."""
        return issubclass(self.fault, Policy)

    @property
    def where(self) -> str:
        return f"{self.tier} with {'+'.join(self.cell.policies)}" if self.tier else self.cell.label()

    @property
    def description(self) -> str:
        return (self.fault.__doc__ or "").strip()


_ALL = (
    Mutant(blocks.LeaksTailBlock, "KV-2", _TIGHT),
    Mutant(blocks.ClearsTableWithoutFreeing, "KV-2", _TIGHT),
    Mutant(blocks.SkipsReferenceOfSharedBlock, "KV-1", _TIGHT),
    Mutant(blocks.KeepsPartialAllocation, "KV-1", _APPEND),
    Mutant(blocks.DisturbsEvictionOrder, "REJ-1", _APPEND),
    Mutant(blocks.HashIgnoresParent, "KV-3", _TIGHT),
    Mutant(blocks.HashIgnoresSalt, "ISO-1", _TIGHT),
    Mutant(blocks.FreesWhileStepsWrite, "KV-3", _ASYNC_DECODER),
    Mutant(blocks.FreesBlocksUnderTransfer, "KV-4", _DECODER),
    Mutant(blocks.FreesBeforeHandOff, "KV-4", _PREFILLER),
    Mutant(blocks.HoldsAbortedLoad, "KV-2", _DECODER),
    Mutant(blocks.StrandsHandOff, "KV-2", _PREFILLER),
    Mutant(blocks.BelievesKvArrived, "KV-3", _DECODER),
    Mutant(blocks.HashIgnoresAdapter, "ISO-1", _TIGHT),
    Mutant(blocks.SlidesTooFar, "KV-3", Cell(variant="sliding")),
    Mutant(blocks.CachesWhatIsNeverComputed, "KV-3", Cell(priority=True)),
    Mutant(blocks.HasNoRoomForDrafts, "LIVE-3", Cell(variant="eagle")),
    Mutant(requests.AdmitsAnyAdapter, "LIVE-3", ADAPTERS, seed=13),
    Mutant(requests.KeepsRejectedDrafts, "TOK-1", Cell(variant="ngram")),
    Mutant(requests.RunsWhilePaused, "PAU-1", _TIGHT),
    Mutant(requests.ForgetsToRequeue, "OUT-1", _TIGHT),
    Mutant(requests.RestartsAfterPreemption, "OUT-3", _V2),
    Mutant(requests.DeliversStaleOutput, "OUT-2", _ASYNC),
    Mutant(requests.ExceedsTokenBudget, "BUD-1", _TIGHT),
    Mutant(requests.ExceedsSequences, "BUD-1", Cell(roomy=True)),
    Mutant(requests.PreemptsFencedVictim, "LIVE-2", _ASYNC_DECODER),
    Mutant(requests.ServesNewestFirst, "FAIR-1", _TIGHT),
    Mutant(requests.RepeatsToken, "OUT-2", _TIGHT),
    Mutant(requests.LosesToken, "OUT-2", _TIGHT),
    Mutant(requests.SpeaksAfterTheEnd, "OUT-1", _TIGHT),
    Mutant(requests.SwallowsTheEnd, "OUT-1", _TIGHT),
    Mutant(requests.RaisesOnSecondAbort, "IDEM-1", _TIGHT),
    Mutant(requests.StopsAdmitting, "LIVE-1", _TIGHT),
    Mutant(requests.RaisesInStep, "LIVE-3", _TIGHT),
    Mutant(requests.OrdersDifferently, "COMP-1", _TIGHT),
    Mutant(runners.AppendsOnResume, "TOK-1", _TIGHT),
    Mutant(runners.KeepsOldOffset, "TOK-1", _V2),
    Mutant(runners.ResumesWithPromptOnly, "TOK-1", _V2),
    Mutant(runners.ForgetsResumedTokens, "TOK-1", Cell(asynchronous=True)),
    Mutant(runners.HidesResumption, "TOK-1", _TIGHT),
    Mutant(recovery.SavesWrongBlocks, "KV-3", _OFFLOAD),
    Mutant(recovery.SavesTooMuch, "KV-3", _OFFLOAD),
    Mutant(recovery.HeedsWhoIsAskedFirst, "DET-1", Cell(offload=True, policies=("offload_restore", "recompute"))),
    Mutant(returning.ReturnsInFlight, "RET-1", _ASYNC_RETURN),
    Mutant(returning.ReturnsSeeded, "RET-1", _RETURN),
    Mutant(returning.ReturnsUnmarked, "RET-1", _RETURN),
    Mutant(returning.ReturnsTheOnlyOne, "RET-1", Cell(role="consumer", policies=("recompute",), max_num_seqs=1)),
    Mutant(returning.ReturnsOnReset, "RET-1", _RETURN),
    Mutant(returning.ForgetsDelivered, "RET-2", _RETURN),
    Mutant(returning.TakesOutputForPrompt, "RET-2", _RETURN),
    Mutant(returning.TellsNothingAgain, "RET-2", _RETURN),
    Mutant(returning.AnswersTooLong, "OUT-2", _RETURN),
    Mutant(returning.ContinuesFromPrompt, "TOK-1", _RETURN),
    Mutant(returning.ReturnsInSilence, "OBS-1", _RETURN),
    Mutant(returning.NeverEndsHeld, "LIVE-1", _RETURN),
    Mutant(answers.TurnsAwayUnmarked, "REJ-1", _APPEND),
    Mutant(answers.TurnsAwayAfterOutput, "OUT-3", _APPEND),
    Mutant(answers.CountsRejected, "REJ-1", _APPEND),
    Mutant(answers.ForgetsToTellRejection, "LIVE-1", _APPEND),
    Mutant(answers.PublishesTwice, "OBS-1", _APPEND),
    Mutant(answers.PublishesNothing, "OBS-1", _APPEND),
    Mutant(answers.EndsInsideTheLoop, "LIVE-3", _APPEND),
    Mutant(answers.RejectsWithToken, "REJ-1", _APPEND),
    Mutant(answers.ReusesStaleLookUp, "KV-3", _APPEND),
    Mutant(answers.NeverResumesAfterHold, "LIVE-1", _APPEND),
)

_POLICIES = (
    Mutant(policies.RejectsUnmarked, "REJ-1", _TIGHT),
    Mutant(policies.HoldsForever, "LIVE-1", _TIGHT),
    Mutant(policies.StarvesLongPrompts, "FAIR-1", _TIGHT),
    Mutant(policies.RemembersAcrossEngines, "DET-1", _TIGHT),
    Mutant(policies.AnswersNegatively, "ANS-1", _TIGHT),
    Mutant(policies.Raises, "LIVE-3", _TIGHT),
    Mutant(policies.WritesToRequests, "LIVE-3", _TIGHT),
    Mutant(policies.ActsInShadow, "SHADOW-1", _TIGHT),
)

_SHORT_FIRST = Cell(policies=("short_request_first",), prefix_caching=False)
_BATCH = Cell(policies=("batch_job_aware",))
_BALANCE = Cell(policies=("balance",))
_PHASES = Cell(policies=("phase_separation",), roomy=True)
_GUARD = Cell(policies=("tpot_guard",), roomy=True)
_LEASE = Cell(policies=("kv_lease",))

_GUARDS = (
    Mutant(guards.AdmitsHopelessAttempts, "APP-1", _APPEND),
    Mutant(guards.ForgetsLongSuffixes, "APP-1", _APPEND),
    Mutant(guards.ForgetsSmallGains, "APP-1", _APPEND),
    Mutant(guards.RejectsUsableAttempts, "APP-1", _APPEND),
    Mutant(guards.IgnoresFullRanks, "BAL-1", _BALANCE),
    Mutant(guards.IgnoresFullCaches, "BAL-1", _BALANCE),
    Mutant(guards.HoldsWithoutBound, "BAL-1", _BALANCE),
    Mutant(guards.BelievesOldNews, "BAL-1", _BALANCE),
    Mutant(guards.HoldsOnlyOnce, "BAL-1", _BALANCE),
    Mutant(guards.RunsAnyNumberOfJobs, "BAT-1", _BATCH),
    Mutant(guards.RemembersThatAllWereTaken, "LIVE-1", replace(_BATCH, role="consumer")),
    Mutant(guards.MixesJobsWithOthers, "ORD-1", _BATCH),
    Mutant(guards.JobsWaitForEver, "ORD-1", _BATCH),
    Mutant(guards.LongRequestsWaitForEver, "ORD-1", _SHORT_FIRST),
    Mutant(guards.TakesShortForLong, "ORD-1", _SHORT_FIRST),
    Mutant(guards.MixesPhases, "PHA-1", _PHASES),
    Mutant(guards.DecodesInAnySize, "PHA-1", _PHASES),
    Mutant(guards.PrefillsInAnySize, "PHA-1", _PHASES),
    Mutant(guards.PrefillsFirst, "PHA-2", _PHASES),
    Mutant(guards.DecodesFirst, "PHA-2", _PHASES),
    Mutant(guards.PrefillsWhenPutOff, "PHA-2", _PHASES),
    Mutant(guards.PrefillsAtFullSpeed, "TPG-1", _GUARD),
    Mutant(guards.MetersEachRequestAlone, "TPG-1", _GUARD),
    Mutant(guards.MetersWithoutStreams, "TPG-1", _GUARD),
    Mutant(guards.StopsPrefill, "TPG-1", _GUARD),
    Mutant(guards.SavesWhatIsNotWorthIt, "OFF-1", _OFFLOAD),
    Mutant(guards.LeasesForEver, "LEA-1", _LEASE),
    Mutant(guards.LeasesWithoutSession, "LEA-1", _LEASE),
    Mutant(guards.LeasesTheWholePool, "LEA-1", _LEASE),
)

_OWNER = Cell(policies=("session_owner",))
_GUESSING = Cell(policies=("rendezvous", "session_owner"))

_ROUTING = (
    Mutant(routing.TriesAnotherDecoder, "OWN-1", _OWNER, tier="R1"),
    Mutant(routing.TriesWhereNobodyIsTurnedAway, "OWN-1", _OWNER, tier="R1"),
    Mutant(routing.KeepsSessionsWhateverTheLoad, "OWN-1", _OWNER, tier="R1"),
    Mutant(routing.SendsWholeRequestsAnywhere, "OWN-1", _OWNER, tier="R1"),
    Mutant(routing.GuessesForFirstTurns, "OWN-1", _GUESSING, tier="R1"),
    Mutant(routing.GuessesWhereNobodyIsTurnedAway, "OWN-1", _GUESSING, tier="R1"),
)

MUTANTS = {mutant.name: mutant for mutant in (*_ALL, *_POLICIES, *_GUARDS, *_ROUTING)}
