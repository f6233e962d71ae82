"""Faults in what becomes of requests: order, budgets, endings."""

from __future__ import annotations

from typing import Any


class ForgetsToRequeue:
    """A preempted request is not put back into the queue."""

    def _preempt_request(self: Any, request: Any, *arguments: Any, **keywords: Any) -> None:
        super()._preempt_request(request, *arguments, **keywords)  # type: ignore[misc]
        self.waiting.remove_requests({request})


class RestartsAfterPreemption:
    """A preempted request forgets what it has said, and says it again."""

    def _preempt_request(self: Any, request: Any, *arguments: Any, **keywords: Any) -> None:
        super()._preempt_request(request, *arguments, **keywords)  # type: ignore[misc]
        del request._all_token_ids[request.num_prompt_tokens :]
        request._output_token_ids.clear()
        del request.block_hashes[request.num_prompt_tokens // self.hash_block_size :]


class DeliversStaleOutput:
    """Output of a step in flight counts although its request was started over meanwhile."""

    def _preempt_request(self: Any, request: Any, *arguments: Any, **keywords: Any) -> None:
        super()._preempt_request(request, *arguments, **keywords)  # type: ignore[misc]
        request.drop_stale_output = False
        request.num_stale_output_tokens = 0


class ExceedsTokenBudget:
    """One token more than the budget."""

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.max_num_scheduled_tokens += 1
        self.scheduler_config.max_num_batched_tokens += 1


class ExceedsSequences:
    """One sequence more than may run."""

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.max_num_running_reqs += 1
        self.max_num_active_reqs += 1


class PreemptsFencedVictim:
    """A request is preempted although a step in flight keeps its blocks."""

    freeing = False

    def _free_request_blocks(self: Any, request: Any) -> None:
        self.freeing = True
        super()._free_request_blocks(request)  # type: ignore[misc]
        self.freeing = False

    def _request_blocks_can_be_freed(self: Any, request: Any) -> bool:
        return not self.freeing or super()._request_blocks_can_be_freed(request)  # type: ignore[misc]


class ServesNewestFirst:
    """Whoever comes last is served first."""

    def add_request(self: Any, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        self.waiting.remove_requests({request})
        self.waiting.prepend_request(request)


class RepeatsToken:
    """Some tokens are delivered twice."""

    def update_from_output(self: Any, *arguments: Any) -> Any:
        outputs = super().update_from_output(*arguments)  # type: ignore[misc]
        for client in outputs.values():
            for output in client.outputs:
                if output.finish_reason is None and output.request_id.endswith("3"):
                    output.new_token_ids = output.new_token_ids * 2
        return outputs


class LosesToken:
    """A request's second token is computed and never delivered."""

    def update_from_output(self: Any, *arguments: Any) -> Any:
        outputs = super().update_from_output(*arguments)  # type: ignore[misc]
        for client in outputs.values():
            for output in client.outputs:
                request = self.requests.get(output.request_id)
                if request is not None and request.num_output_tokens == 2:
                    output.new_token_ids = []
        return outputs


class SpeaksAfterTheEnd:
    """A finished request is finished once more in the next step that has output."""

    last: Any = None

    def update_from_output(self: Any, *arguments: Any) -> Any:
        outputs = super().update_from_output(*arguments)  # type: ignore[misc]
        for client in outputs.values():
            ended = [output for output in client.outputs if output.finish_reason is not None]
            if self.last is not None:
                client.outputs.append(self.last)
            self.last = ended[0] if ended else None
        return outputs


class SwallowsTheEnd:
    """Some requests end without anybody being told."""

    def update_from_output(self: Any, *arguments: Any) -> Any:
        outputs = super().update_from_output(*arguments)  # type: ignore[misc]
        for client in outputs.values():
            client.outputs = [output for output in client.outputs if not self._swallows(output)]
        return outputs

    def _swallows(self, output: Any) -> bool:
        return output.finish_reason is not None and output.request_id.endswith("5")


class RaisesOnSecondAbort:
    """Ending a request that has ended is an error."""

    def finish_requests(self: Any, request_ids: Any, finished_status: Any) -> Any:
        if isinstance(request_ids, str):
            request = self.requests.get(request_ids)
            if request is None or request.is_finished():
                raise KeyError(request_ids)
        return super().finish_requests(request_ids, finished_status)  # type: ignore[misc]


class StopsAdmitting:
    """From some step on nothing is admitted any more."""

    def _handle_blocked_waiting_request(self: Any, request: Any) -> bool:
        ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        return ready and self.current_step < 30


class RaisesInStep:
    """A step raises."""

    def update_from_output(self: Any, *arguments: Any) -> Any:
        assert self.current_step < 30, "an assertion of the scheduler"
        return super().update_from_output(*arguments)  # type: ignore[misc]


class OrdersDifferently:
    """A scheduler that should be the engine's own lets the shortest request go first."""

    def schedule(self: Any, *arguments: Any, **keywords: Any) -> Any:
        waiting = sorted(self.waiting, key=lambda request: request.num_prompt_tokens)
        self.waiting.remove_requests(set(waiting))
        for request in waiting:
            self.waiting.add_request(request)
        return super().schedule(*arguments, **keywords)  # type: ignore[misc]


class RunsWhilePaused:
    """A pause stops nobody."""

    def set_pause_state(self: Any, state: Any) -> None:
        pass


class AdmitsAnyAdapter:
    """Adapters of running requests that a step leaves out are not counted."""

    def adapter_fits(self: Any, request: Any) -> bool:
        return True


class KeepsRejectedDrafts:
    """Drafts that were rejected count as computed."""

    def update_from_output(self: Any, output: Any, result: Any) -> Any:
        drafts = output.scheduled_spec_decode_tokens
        for name, rejected in list(drafts.items()):
            sampled = result.sampled_token_ids[result.req_id_to_index[name]]
            if len(sampled) <= len(rejected):
                drafts[name] = rejected[: max(len(sampled) - 1, 0)]
        return super().update_from_output(output, result)  # type: ignore[misc]
