"""Faults in carrying out what policies answer."""

from __future__ import annotations

from typing import Any

from schedloom.core.wire import REJECTION_PREFIX


class TurnsAwayUnmarked:
    """The router's mark is not looked at: ordinary requests are turned away."""

    def add_request(self: Any, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        if request.request_id.endswith("7"):
            self.turned_away[request.request_id] = "no_usable_prefix"


class TurnsAwayAfterOutput:
    """A preempted local attempt is turned away, although its client has tokens already."""

    def _preempt_request(self: Any, request: Any, *arguments: Any, **keywords: Any) -> None:
        super()._preempt_request(request, *arguments, **keywords)  # type: ignore[misc]
        if request.num_output_tokens and request.sampling_params.extra_args:
            self.turned_away[request.request_id] = "no_usable_prefix"


class ForgetsToTellRejection:
    """A request that was turned away waits for ever."""

    def _end_turned_away(self: Any, outputs: Any) -> None:
        pass


class PublishesTwice:
    """Every rejection is in the decision log two times."""

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        record = self.decisions.record

        def twice(decision: Any) -> None:
            record(decision)
            record(decision)

        self.decisions.record = twice


class PublishesNothing:
    """Rejections happen, and the decision log says nothing."""

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.decisions.record = lambda decision: None


class EndsInsideTheLoop:
    """A rejected request is ended where the verdict falls, inside the loop that walks the queue."""

    def _handle_blocked_waiting_request(self: Any, request: Any) -> bool:
        ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        if request.request_id in self.turned_away:
            self.finish_requests(request.request_id, type(request.status).FINISHED_ABORTED)
        return ready


class RejectsWithToken:
    """A rejection carries a token."""

    def update_from_output(self: Any, *arguments: Any) -> Any:
        outputs = super().update_from_output(*arguments)  # type: ignore[misc]
        for client in outputs.values():
            for output in client.outputs:
                if str(output.stop_reason).startswith(REJECTION_PREFIX):
                    output.new_token_ids = [1]
        return outputs


class ReusesStaleLookUp:
    """A look-up that found something is handed to the engine for the next request that finds nothing."""

    kept: Any = None

    def _get_local_prefix_cache_hit(self: Any, request: Any, *limits: Any, **named: Any) -> Any:
        hit = super()._get_local_prefix_cache_hit(request, *limits, **named)  # type: ignore[misc]
        if hit[1]:
            self.kept = hit
        elif self.kept is not None and self.kept[1] < request.num_tokens:
            return self.kept
        return hit


class NeverResumesAfterHold:
    """The pause of a step outlives the step."""

    def schedule(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output = super().schedule(*arguments, **keywords)  # type: ignore[misc]
        if self.current_step > 20:
            self._pause_state = type(self._pause_state).PAUSED_NEW
        return output


class CountsRejected:
    """The look-up of a request that is turned away enters the cache's statistics."""

    def _handle_blocked_waiting_request(self: Any, request: Any) -> bool:
        ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        if request.request_id in self.turned_away:
            self.kv_cache_manager.record_prefix_cache_stats(request, 0)
        return ready
