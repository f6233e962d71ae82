"""The scheduler that lets policies take part in vLLM's scheduling.

It stands before vLLM's ``Scheduler`` or ``AsyncScheduler``, overrides only the seams of ``seams.SEAMS``, and calls
``super()`` in every one. Nothing of ``schedule()`` or ``update_from_output()`` is repeated here or in the parts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from schedloom.adapters.engine import seams
from schedloom.adapters.engine.control import Control
from schedloom.adapters.engine.hooks import HookCaller
from schedloom.adapters.engine.mended import Mended
from schedloom.adapters.engine.trace import DecisionTrace
from schedloom.adapters.engine.views import VllmEngineView
from schedloom.core.composition import PolicySet
from schedloom.core.wire import REJECTION_PREFIX


class PolicyScheduler(Mended):
    """What all parts share: the policies, the view that they get, the sink of decisions, and turning requests away."""

    HOOKS: ClassVar[tuple[str, ...]] = ()
    policies: ClassVar[PolicySet]
    waiting: Any
    _reserve_prefill_lookahead: Any

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.view = VllmEngineView(self)
        self.decisions = DecisionTrace()
        self._callers: list[HookCaller] = []
        self._control = Control(self.decisions, self._callers)
        self.turned_away: dict[str, str] = {}
        self.preempted: dict[str, Any] = {}
        """All that have been preempted and have not ended."""

    @classmethod
    def serves(cls, policies: PolicySet) -> bool:
        """Whether a composition of ``policies`` uses this part."""
        return any(map(policies.of, cls.HOOKS))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.turned_away:
            self._end_turned_away(outputs)
        if not self.running:
            self._control.rest()
        return outputs

    def _preempt_request(self, request: Any, *arguments: Any, **keywords: Any) -> None:
        self.preempted[request.request_id] = request
        super()._preempt_request(request, *arguments, **keywords)

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any:
        self.preempted.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)

    def caller(self, hook: str) -> HookCaller:
        """The policies' implementations of ``hook``, to be called by a part."""
        caller = HookCaller(self.policies, hook)
        self._callers.append(caller)
        return caller

    def look_up_local_prefix(self, request: Any) -> Any:
        """vLLM's own look-up: blocks, tokens, shared-prefix boundary, whether cache groups disagree."""
        return super()._get_local_prefix_cache_hit(request)

    def close_lane(self, request: Any) -> None:
        """Put off everybody in this request's lane until the step is over, where the queue has lanes."""

    def hand_back(self, request: Any) -> str | None:
        """Have ``request``, which is being preempted, end so that the router continues it; or why that cannot be."""
        return "not_possible_here"

    def end(self, request: Any, outputs: Any, finish_reason: Any, stop_reason: str | None) -> None:
        """End ``request`` where vLLM ends requests, in ``update_from_output``: its loop in ``schedule()`` would break.

        ABORTED inside, because a stop would make a P/D connector keep KV for a pull that never comes.
        """
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        client = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
        client.outputs.append(_ending(request, finish_reason, stop_reason, self.log_stats))

    def _end_turned_away(self, outputs: Any) -> None:
        turned_away, self.turned_away = self.turned_away, {}
        for request_id, reason in turned_away.items():
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                self.end(request, outputs, FinishReason.STOP, REJECTION_PREFIX + reason)


def composed(base: Any, policies: PolicySet, transfer_peers: Collection[str] = ()) -> Any:
    """A subclass of ``base``, a vLLM ``Scheduler``, that consults ``policies``; with the parts they use, and no others.

    With ``transfer_peers`` it moves KV with these alone.

    Raises SeamError when ``base`` lacks a seam.
    """
    from schedloom.adapters.engine.parts.admission import AdmissionPart
    from schedloom.adapters.engine.parts.beginnings import BeginningsPart
    from schedloom.adapters.engine.parts.endings import EndingsPart
    from schedloom.adapters.engine.parts.metering import MeteringPart
    from schedloom.adapters.engine.parts.ordering import OrderingPart
    from schedloom.adapters.engine.parts.peers import PeersPart
    from schedloom.adapters.engine.parts.phases import PhasesPart
    from schedloom.adapters.engine.parts.recovery import RecoveryPart
    from schedloom.adapters.engine.parts.returning import ReturningPart
    from schedloom.adapters.engine.parts.strangers import StrangersPart

    seams.check(base)
    known = (
        BeginningsPart,
        AdmissionPart,
        EndingsPart,
        MeteringPart,
        OrderingPart,
        PeersPart,
        PhasesPart,
        RecoveryPart,
        ReturningPart,
    )
    parts: list[type] = [part for part in known if part.serves(policies)]
    if transfer_peers:
        parts.insert(0, StrangersPart)
    facts = {"policies": policies, "transfer_peers": tuple(transfer_peers)}
    return type(f"Schedloom{base.__name__}", (*parts, PolicyScheduler, base), facts)


def _ending(request: Any, finish_reason: Any, stop_reason: str | None, log_stats: bool) -> EngineCoreOutput:
    if log_stats and not request.num_preemptions:
        # It was never scheduled: vLLM's statistics would take the queueing time from 0 to its arrival, and that is
        # a negative number.
        request.record_event(EngineCoreEventType.SCHEDULED)
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
