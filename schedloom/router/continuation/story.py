"""One request that its engine may hand back: how that is told, and what must be known to continue."""

from __future__ import annotations

from collections.abc import Iterator

from schedloom.core.continuation import HANDED_BACK_PREFIX, BadTicket, HandBack
from schedloom.router.continuation.told import Retold, Told
from schedloom.router.failures import Failure
from schedloom.router.sse import data_of, parsed, split_events

_SIGN = f'"{HANDED_BACK_PREFIX}'.encode()
_NOTHING = HandBack("", (), ())


class Story:
    """What the client of one request has of its answer, and how the engine at work gave it back."""

    __slots__ = ("_retold", "_told", "hand_back", "refusal")

    def __init__(self) -> None:
        self.hand_back: HandBack | None = None
        self.refusal = ""
        self._told = Told()
        self._retold: Retold | None = None

    def news_in(self, events: bytes) -> bytes:
        """What the client lacks of ``events``. Raises Differs when they do not fit to what it has."""
        if self._retold is not None:
            events = self._retold.rest_of(events)
        self._told.add(events)
        return events

    async def continue_(self) -> HandBack:
        """From here on the answer is told again from its beginning. Raises Differs where nobody can tell its rest."""
        hand_back, self.hand_back = self.hand_back or _NOTHING, None
        self._retold = await Retold.of(self._told) if self._told.begun else None
        return hand_back


def handed_back_in(events: bytes) -> tuple[bytes, HandBack] | None:
    """The events before a hand-back and the hand-back, where there is one.

    A model may say the same words in its content, never as a stop reason. Raises Failure for a damaged one.
    """
    if _SIGN not in events:
        return None
    begin = 0
    for event in split_events(events):
        hand_back = handed_back(data_of(event) or b"")
        if hand_back is not None:
            return events[:begin], hand_back
        begin += len(event)
    return None


def handed_back(answer: bytes) -> HandBack | None:
    """The hand-back that a whole answer or a chunk of one is, else ``None``."""
    if _SIGN not in answer:
        return None
    try:
        return next(filter(None, map(HandBack.read, _stop_reasons(answer))), None)
    except BadTicket as error:
        raise Failure.own(502, f"The engine handed the request back unreadably: {error}", "bad_hand_back") from error


def _stop_reasons(answer: bytes) -> Iterator[object]:
    return (choice.get("stop_reason") for choice in parsed(answer).get("choices") or ())
