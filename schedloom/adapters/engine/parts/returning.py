"""Returning: requests that are handed back to the router, and those that come back to be continued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.engine import FinishReason

from schedloom.adapters.engine.continuable import continue_after, engine_obstacle, obstacle, ticket_of
from schedloom.adapters.engine.scheduler import PolicyScheduler
from schedloom.core.composition import PolicySet
from schedloom.core.continuation import BadTicket, HandBack, Ticket, digest, is_continuable
from schedloom.core.decisions import Decision, Fact
from schedloom.core.wire import REJECTION_PREFIX

PREEMPTED = "preempted"
"""The reason told with a request that is handed back."""


class ReturningPart(PolicyScheduler):
    """Hands a preempted request back once its output in flight has arrived, and continues those that others handed
    back, whether a policy is switched on or not: the output so far is prompt here, and told with the first output."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._policy = next(policy.name for policy in self.policies.policies if policy.hands_back)
        self._engine_obstacle = engine_obstacle(self)
        self._held: dict[str, Any] = {}
        self._untold: dict[str, Sequence[int]] = {}

    @classmethod
    def serves(cls, policies: PolicySet) -> bool:
        return any(policy.hands_back for policy in policies.policies)

    def add_request(self, request: Any) -> None:
        refusal = self._resume(request)
        super().add_request(request)
        if refusal is not None:
            self.turned_away[request.request_id] = refusal

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._held:
            self._end_held(outputs)
        if self._untold:
            self._tell(outputs)
        return outputs

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        if request.request_id in self._held or request.request_id in self.turned_away:
            return False
        return super()._handle_blocked_waiting_request(request)

    # Handing back

    def hand_back(self, request: Any) -> str | None:
        against = self._against_returning(request)
        if against is None:
            self._held[request.request_id] = request
        return against

    def _against_returning(self, request: Any) -> str | None:
        if request.sampling_params is None or not is_continuable(request.sampling_params.extra_args):
            return "unmarked"
        if not request.num_output_tokens:
            return "no_output"
        if not (self.running or self.kv_holding_waiting):
            # Nobody else holds KV: wherever it went the same would happen.
            return "sole_request"
        return self._engine_obstacle or obstacle(request)

    def _end_held(self, outputs: Any) -> None:
        """End those whose output has all arrived; one of them may have ended by itself, or was aborted."""
        for request_id, request in list(self._held.items()):
            if request.is_finished():
                del self._held[request_id]
            elif not request.num_stale_output_tokens:
                del self._held[request_id]
                self._end_one(request, outputs)

    def _end_one(self, request: Any, outputs: Any) -> None:
        if self._is_answered(request):
            self.end(request, outputs, FinishReason.LENGTH, None)
            return
        handed = hand_back_of(request)
        self.end(request, outputs, FinishReason.STOP, handed.stop_reason)
        self._note(request, "recover", "HANDED_BACK", PREEMPTED, {"output_tokens": len(handed.output)})

    # Continuing

    def _resume(self, request: Any) -> str | None:
        """Why a continuation cannot be taken up; ``None`` when it is, and for every other request."""
        try:
            ticket = ticket_of(request)
        except BadTicket:
            return "bad_ticket"
        if ticket is None:
            return None
        refusal = self._against_continuing(request, ticket)
        if refusal is None:
            self._take_up(request, ticket.output)
        return refusal

    def _against_continuing(self, request: Any, ticket: Ticket) -> str | None:
        limit = self.vllm_config.model_config.get_vocab_size()
        if self._engine_obstacle or obstacle(request) or not all(0 <= token < limit for token in ticket.output):
            return "bad_ticket"
        return None if digest(request.prompt_token_ids) == ticket.prompt_digest else "prompt_differs"

    def _take_up(self, request: Any, output: Sequence[int]) -> None:
        facts = {"prompt_tokens": request.num_prompt_tokens, "output_tokens": len(output)}
        self._note(request, "resume", "RESUME", "continued", facts)
        if not output:
            return
        self._untold[request.request_id] = output
        continue_after(request, output)
        if self._is_answered(request):
            self._held[request.request_id] = request

    def _is_answered(self, request: Any) -> bool:
        return bool(request.max_tokens <= 0 or request.num_tokens >= self.max_model_len)

    def _tell(self, outputs: Any) -> None:
        """Tell what a continuation began with, at the front of its first output."""
        for client in outputs.values():
            for output in client.outputs:
                told = self._untold.pop(output.request_id, None)
                if told and not str(output.stop_reason).startswith(REJECTION_PREFIX):
                    tell_first(output, told)
        for request_id in [name for name in self._untold if name not in self.requests]:
            del self._untold[request_id]

    def _note(self, request: Any, hook: str, verdict: str, reason: str, facts: Mapping[str, Fact]) -> None:
        self.decisions.record(Decision(request.request_id, self._policy, hook, verdict, reason, facts))


def hand_back_of(request: Any) -> HandBack:
    """All that is to be known of ``request``: the client's own prompt, and its output in this engine and before."""
    ticket = ticket_of(request)
    start = request.num_prompt_tokens - (len(ticket.output) if ticket else 0)
    tokens = request._all_token_ids
    return HandBack(PREEMPTED, tokens[:start], tokens[start:])


def tell_first(output: Any, told: Sequence[int]) -> None:
    """Put ``told`` before the new tokens of ``output``, and count as prompt only what the client calls so."""
    output.new_token_ids = [*told, *output.new_token_ids]
    stats = output.prefill_stats
    if stats is not None:
        prompt = stats.num_prompt_tokens - len(told)
        local = min(stats.num_local_cached_tokens, prompt)
        created = stats.num_cache_creation_tokens
        stats.set(prompt, local, min(stats.num_external_cached_tokens, prompt - local))
        stats.num_cache_creation_tokens = min(created, prompt - stats.num_cached_tokens)
