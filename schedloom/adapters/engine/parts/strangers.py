"""Transfer parameters that name an engine nobody told this one of."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from vllm.v1.engine import FinishReason

from schedloom.adapters.engine.scheduler import PolicyScheduler
from schedloom.core.config import PATH
from schedloom.core.transfer_peers import stranger_in

log = logging.getLogger(__name__)


class StrangersPart(PolicyScheduler):
    """Ends a request whose transfer parameters lead to a stranger, before a connector sees them.

    A connector connects to whatever address a request names, and takes the KV that it gets there for the prompt's.
    """

    transfer_peers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._misled: dict[str, str] = {}

    def add_request(self, request: Any) -> None:
        stranger = stranger_in(request.kv_transfer_params, self.transfer_peers)
        if stranger is not None:
            request.kv_transfer_params = None
            self._misled[request.request_id] = stranger
            log.error("request %s: %s", request.request_id, _sentence(stranger))
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        return request.request_id not in self._misled and super()._handle_blocked_waiting_request(request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        misled, self._misled = self._misled, {}
        for request_id, stranger in misled.items():
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                self.end(request, outputs, FinishReason.ERROR, None)
                _tell(outputs[request.client_index].outputs[-1], _sentence(stranger))
        return outputs


def _sentence(stranger: str) -> str:
    return f"KV is not moved with {stranger}; name it in {PATH}.transfer_peers if it is one of yours"


def _tell(output: Any, sentence: str) -> None:
    """What the client reads, from vLLM 0.33 on; before, it reads of an internal error."""
    if hasattr(output, "error"):
        from vllm.outputs import RequestError

        output.error = RequestError("validation_error", sentence)
