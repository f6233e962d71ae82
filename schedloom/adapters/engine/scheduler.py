"""The mixin that lets policies take part in vLLM's scheduling.

It stands before vLLM's ``Scheduler`` or ``AsyncScheduler``, overrides only the seams of ``seams.SEAMS`` and calls
``super()`` in every one. Nothing of ``schedule()`` or ``update_from_output()`` is repeated here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from schedloom.adapters.engine.admission import Admissions
from schedloom.adapters.engine.trace import LogSink
from schedloom.adapters.engine.views import VllmEngineView
from schedloom.core.composition import PolicySet
from schedloom.core.wire import REJECTION_PREFIX

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object


class PolicyScheduler(_Base):
    """A vLLM scheduler that consults ``policies``."""

    policies: ClassVar[PolicySet]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._view = VllmEngineView(self)
        self._admissions = Admissions(self.policies, self._view, LogSink())

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self._admissions.arrive(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        output = super().schedule(throttle_prefills)
        self._admissions.end_step()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._admissions.rejected:
            self._end_rejected(outputs)
        return outputs

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            return False
        return self._admissions.may_proceed(request)

    def _get_local_prefix_cache_hit(self, request: Any, *limits: Any, **named_limits: Any) -> Any:
        hit = self._view.take_hit(request)
        limited = any(limit is not None for limit in (*limits, *named_limits.values()))
        if hit is None or limited:
            return super()._get_local_prefix_cache_hit(request, *limits, **named_limits)
        return hit

    def look_up_local_prefix(self, request: Any) -> Any:
        """vLLM's own look-up: blocks, tokens, shared-prefix boundary, whether cache groups disagree."""
        return super()._get_local_prefix_cache_hit(request)

    def _end_rejected(self, outputs: Any) -> None:
        """End the turned-away requests here, where vLLM ends requests: inside ``schedule()`` its loop would break."""
        rejected, self._admissions.rejected = self._admissions.rejected, {}
        for request_id, reason in rejected.items():
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            # ABORTED inside, because a stop would make a P/D connector keep KV for a pull that never comes.
            self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            client = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            client.outputs.append(_rejection(request, reason, self.log_stats))


def _rejection(request: Any, reason: str, log_stats: bool) -> EngineCoreOutput:
    if log_stats:
        # Without it vLLM's statistics would take the queueing time from 0 to its arrival: a negative number.
        request.record_event(EngineCoreEventType.SCHEDULED)
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=FinishReason.STOP,
        stop_reason=REJECTION_PREFIX + reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
