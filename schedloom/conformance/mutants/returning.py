"""Faults in handing requests back to the router and in continuing them."""

from __future__ import annotations

from typing import Any

from schedloom.core.continuation import HandBack


class ReturnsInFlight:
    """A running request goes back at once when blocks are short, whatever a step in flight has sampled for it."""

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.torn: list[tuple[Any, HandBack]] = []

    def schedule(self: Any, *arguments: Any, **keywords: Any) -> Any:
        request = self.running[-1] if len(self.running) > 1 else None
        if request is not None and request.num_in_flight_tokens and self._tears(request):
            tokens = list(request.all_token_ids)
            handed = HandBack("preempted", tokens[: request.num_prompt_tokens], tokens[request.num_prompt_tokens :])
            self.torn.append((request, handed))
            self.finish_requests(request.request_id, type(request.status).FINISHED_ABORTED)
        return super().schedule(*arguments, **keywords)  # type: ignore[misc]

    def _tears(self: Any, request: Any) -> bool:
        short = self.kv_cache_manager.block_pool.get_num_free_blocks() < 40
        return short and bool(request.num_output_tokens) and self._against_returning(request) is None

    def update_from_output(self: Any, *arguments: Any) -> Any:
        outputs = super().update_from_output(*arguments)  # type: ignore[misc]
        for request, handed in self.torn:
            self.end(request, outputs, type(request.get_finished_reason()).STOP, handed.stop_reason)
        self.torn.clear()
        return outputs


class ReturnsSeeded:
    """Tokens that are drawn from a seed are thought to depend on nothing but tokens."""

    def _against_returning(self: Any, request: Any) -> str | None:
        against: str | None = super()._against_returning(request)  # type: ignore[misc]
        return None if against == "seed" else against


class ReturnsUnmarked:
    """The router's mark is not looked at: it cannot continue what is handed back."""

    def _against_returning(self: Any, request: Any) -> str | None:
        against: str | None = super()._against_returning(request)  # type: ignore[misc]
        return None if against == "unmarked" else against


class ReturnsTheOnlyOne:
    """The only request that holds KV goes back too, and would for ever."""

    def _against_returning(self: Any, request: Any) -> str | None:
        against: str | None = super()._against_returning(request)  # type: ignore[misc]
        return None if against == "sole_request" else against


class ReturnsOnReset:
    """A reset of the prefix cache is taken for a want of blocks."""

    def _preempt_request(self: Any, request: Any, *arguments: Any, **keywords: Any) -> None:
        self._resetting = False
        super()._preempt_request(request, *arguments, **keywords)  # type: ignore[misc]


class ForgetsDelivered:
    """A hand-back lacks the last token that its client has."""

    def end(self: Any, request: Any, outputs: Any, finish_reason: Any, stop_reason: Any) -> None:
        if handed := HandBack.read(stop_reason):
            stop_reason = HandBack(handed.reason, handed.prompt, handed.output[:-1]).stop_reason
        super().end(request, outputs, finish_reason, stop_reason)  # type: ignore[misc]


class TakesOutputForPrompt:
    """A request that is handed back twice names what it was continued with as its client's prompt."""

    def end(self: Any, request: Any, outputs: Any, finish_reason: Any, stop_reason: Any) -> None:
        if handed := HandBack.read(stop_reason):
            tokens, start = list(request.all_token_ids), request.num_prompt_tokens
            stop_reason = HandBack(handed.reason, tokens[:start], tokens[start:]).stop_reason
        super().end(request, outputs, finish_reason, stop_reason)  # type: ignore[misc]


class TellsNothingAgain:
    """A continuation begins with its own tokens."""

    def _tell(self: Any, outputs: Any) -> None:
        self._untold.clear()


class AnswersTooLong:
    """A continuation may be as long as a whole answer."""

    def add_request(self: Any, request: Any) -> None:
        most = request.max_tokens
        super().add_request(request)  # type: ignore[misc]
        request.max_tokens = most


class ContinuesFromPrompt:
    """A continuation forgets the last token of its ticket."""

    def _take_up(self: Any, request: Any, output: Any) -> None:
        super()._take_up(request, output[:-1])  # type: ignore[misc]
        if output[:-1]:
            self._untold[request.request_id] = output


class ReturnsInSilence:
    """Requests are handed back, and the decision log says nothing."""

    def _note(self: Any, *arguments: Any) -> None:
        pass


class NeverEndsHeld:
    """A request that is to go back waits for ever."""

    def _end_held(self: Any, outputs: Any) -> None:
        pass
