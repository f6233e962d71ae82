"""Built-in policies from which a single guard is taken away: each stands before the policy that it names."""

from __future__ import annotations

from typing import Any

from schedloom.core.decisions import Admission, Lane, Phase, StepPlan, Verdict
from schedloom.core.hookspecs import hookimpl
from schedloom.core.views import EngineView, RequestView

FOR_EVER = 1e9


class AdmitsHopelessAttempts:
    """A local attempt is admitted whatever is there of it."""

    policy = "append_prefill"

    def _judge(self: Any, request: RequestView, view: EngineView) -> Admission | None:
        answer: Admission | None = super()._judge(request, view)  # type: ignore[misc]
        return None if answer is None or answer.verdict is Verdict.REJECT else answer


class ForgetsLongSuffixes:
    """A prefix is usable however much is left to compute behind it."""

    policy = "append_prefill"

    def _judge(self: Any, request: RequestView, view: EngineView) -> Admission | None:
        answer: Admission | None = super()._judge(request, view)  # type: ignore[misc]
        known = view.reusable_kv(request).known_tokens
        return None if known >= self.settings.min_reused_tokens else answer


class ForgetsSmallGains:
    """A prefix is usable however short it is."""

    policy = "append_prefill"

    def _judge(self: Any, request: RequestView, view: EngineView) -> Admission | None:
        answer: Admission | None = super()._judge(request, view)  # type: ignore[misc]
        known = view.reusable_kv(request).known_tokens
        return None if request.num_prompt_tokens - known <= self.settings.max_append_tokens else answer


class RejectsUsableAttempts:
    """Every local attempt is turned away."""

    policy = "append_prefill"

    def _judge(self: Any, request: RequestView, view: EngineView) -> Admission | None:
        return Admission(Verdict.REJECT, "no_usable_prefix") if request.is_local_attempt else None


class IgnoresFullRanks:
    """Slots that are all taken do not make a rank full."""

    policy = "balance"

    def _is_full(self: Any, peer: Any) -> bool:
        return bool(peer.age <= self.settings.stale_seconds and peer.kv_usage >= self.settings.full_kv_usage)


class IgnoresFullCaches:
    """KV blocks that are all taken do not make a rank full."""

    policy = "balance"

    def _is_full(self: Any, peer: Any) -> bool:
        return bool(peer.age <= self.settings.stale_seconds and peer.running >= peer.max_running)


class HoldsWithoutBound:
    """As long as a rank is full, or says nothing any more after it was, nobody is admitted."""

    policy = "balance"

    @hookimpl
    def admit(self: Any, request: RequestView, view: EngineView) -> Admission | None:
        answer: Admission | None = super().admit(request, view)  # type: ignore[misc]
        full = any(self._is_full(peer) for peer in view.peers)
        return Admission(Verdict.HOLD, "peer_full") if full else answer


class BelievesOldNews:
    """What a rank said last holds until it says something else."""

    policy = "balance"

    def _is_full(self: Any, peer: Any) -> bool:
        return bool(peer.running >= peer.max_running or peer.kv_usage >= self.settings.full_kv_usage)


class HoldsOnlyOnce:
    """How long it has held counts from the first time that a rank was full."""

    policy = "balance"
    first: float | None = None

    @hookimpl
    def admit(self: Any, request: RequestView, view: EngineView) -> Admission | None:
        answer: Admission | None = super().admit(request, view)  # type: ignore[misc]
        if self.first is None:
            self.first = self._since
        self._since = self.first
        return answer


class RunsAnyNumberOfJobs:
    """Batch jobs are admitted however many there are."""

    policy = "batch_job_aware"

    @hookimpl
    def admit(self: Any, request: RequestView, view: EngineView) -> Admission | None:
        return None


class RemembersThatAllWereTaken:
    """Once as many batch jobs run as may, the others wait until one has ended, though one may have lost its KV."""

    policy = "batch_job_aware"
    all_taken: Admission | None = None

    @hookimpl
    def admit(self: Any, request: RequestView, view: EngineView) -> Admission | None:
        if self._is_batch(request) and self.all_taken is None:
            self.all_taken = super().admit(request, view)  # type: ignore[misc]
        return self.all_taken if self._is_batch(request) else None

    @hookimpl
    def request_finished(self: Any, request: RequestView) -> None:
        if self._is_batch(request):
            self.all_taken = None


class MixesJobsWithOthers:
    """Batch jobs have no lane of their own."""

    policy = "batch_job_aware"

    @hookimpl
    def queue_key(self: Any, request: RequestView) -> Lane | None:
        return None


class JobsWaitForEver:
    """Interactive requests go first however long a batch job has waited."""

    policy = "batch_job_aware"

    @hookimpl
    def queue_key(self: Any, request: RequestView) -> Lane | None:
        return Lane("batch", FOR_EVER) if self._is_batch(request) else None


class LongRequestsWaitForEver:
    """Short requests go first however long a long one has waited."""

    policy = "short_request_first"

    @hookimpl
    def queue_key(self: Any, request: RequestView, view: EngineView) -> Lane | None:
        return None if self._is_short(request, view) else Lane("long", FOR_EVER)


class TakesShortForLong:
    """The short wait for the long."""

    policy = "short_request_first"

    def _is_short(self: Any, request: RequestView, view: EngineView) -> bool:
        return not super()._is_short(request, view)  # type: ignore[misc]


class MixesPhases:
    """Any step may prefill and decode."""

    policy = "phase_separation"

    @hookimpl
    def plan_step(self: Any, view: EngineView) -> StepPlan | None:
        super().plan_step(view)  # type: ignore[misc]
        return None


class DecodesInAnySize:
    """Decode batches may be larger than any that is compiled."""

    policy = "phase_separation"

    @hookimpl
    def plan_step(self: Any, view: EngineView) -> StepPlan:
        plan: StepPlan = super().plan_step(view)  # type: ignore[misc]
        return StepPlan(plan.phase)


class PrefillsInAnySize:
    """Prefill batches may be larger than any that is compiled."""

    policy = "phase_separation"

    @hookimpl
    def limit_tokens(self: Any, request: RequestView, tokens: int, view: EngineView) -> int | None:
        return None


class PrefillsFirst:
    """As long as anybody needs prefill, nobody decodes."""

    policy = "phase_separation"

    def _alternate(self: Any, nothing_fitted: bool) -> Phase:
        return Phase.PREFILL


class DecodesFirst:
    """As long as anybody decodes, nobody is prefilled."""

    policy = "phase_separation"

    def _alternate(self: Any, nothing_fitted: bool) -> Phase:
        return Phase.DECODE


class PrefillsWhenPutOff:
    """Prefill has its turn in steps in which vLLM puts it off."""

    policy = "phase_separation"

    @hookimpl
    def plan_step(self: Any, view: EngineView) -> StepPlan:
        plan: StepPlan = super().plan_step(Unthrottled(view))  # type: ignore[misc]
        return plan


class Unthrottled:
    """An engine of which nobody knows that it puts prefill off."""

    prefill_throttled = False

    def __init__(self, view: EngineView) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


class PrefillsAtFullSpeed:
    """Prefill is not metered."""

    policy = "tpot_guard"

    @hookimpl
    def limit_tokens(self: Any, request: RequestView, tokens: int, view: EngineView) -> int | None:
        return None


class MetersEachRequestAlone:
    """Every prompt may take what is left for all of them."""

    policy = "tpot_guard"

    @hookimpl
    def limit_tokens(self: Any, request: RequestView, tokens: int, view: EngineView) -> int | None:
        left = self._left
        granted: int | None = super().limit_tokens(request, tokens, view)  # type: ignore[misc]
        self._left = left
        return granted


class MetersWithoutStreams:
    """Prefill is cut although nobody is disturbed by it."""

    policy = "tpot_guard"

    @hookimpl
    def limit_tokens(self: Any, request: RequestView, tokens: int, view: EngineView) -> int | None:
        granted: int = self._grant(tokens)
        return granted


class StopsPrefill:
    """Where a step has no time for prefill, no prompt gets on."""

    policy = "tpot_guard"

    @hookimpl
    def step_begin(self: Any) -> None:
        self._left = self.cost.tokens_within(self.settings.tpot_ms / 1000) or 0


class SavesWhatIsNotWorthIt:
    """However little was computed is saved."""

    policy = "offload_restore"

    def __init__(self: Any, settings: Any = None) -> None:
        super().__init__(settings)  # type: ignore[call-arg]
        self.settings = self.settings.model_copy(update={"min_saved_tokens": 1})


class LeasesForEver:
    """A lease does not end."""

    policy = "kv_lease"

    def __init__(self: Any, settings: Any = None) -> None:
        super().__init__(settings)  # type: ignore[call-arg]
        self.settings = self.settings.model_copy(update={"ttl_seconds": FOR_EVER})


class LeasesWithoutSession:
    """The KV of a request without a session is preferred too."""

    policy = "kv_lease"

    @hookimpl
    def request_finished(self: Any, request: Any, view: EngineView) -> None:
        super().request_finished(WithSession(request), view)  # type: ignore[misc]


class WithSession:
    """A request that has its own session when it has none."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.session = request.session or request.request_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class LeasesTheWholePool:
    """There is no bound on how much is preferred."""

    policy = "kv_lease"

    def __init__(self: Any, settings: Any = None) -> None:
        super().__init__(settings)  # type: ignore[call-arg]
        self.settings = self.settings.model_copy(update={"max_share": FOR_EVER})
        self._leases.shrink = lambda most, now: None
