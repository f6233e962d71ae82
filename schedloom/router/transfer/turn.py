"""What a Decoder's answer tells of the KV behind it, taken from it on its way to the client."""

from __future__ import annotations

from typing import Any

import orjson

from schedloom.router.sse import data_of, event_of, parsed, split_events
from schedloom.router.transfer.parameters import Parameters

_IDS = (b'"token_ids"', b'"prompt_token_ids"', b'"kv_transfer_params"')


class Turn:
    """The tokens of one answer and of its prompt, and where their KV is kept.

    The router asks for token ids itself; unless the client has ``asked`` for them too, it does not see them.
    """

    def __init__(self, *, asked: bool) -> None:
        self.parameters: Parameters = {}
        self._asked = asked
        self._prompt: list[int] = []
        self._output: list[int] = []

    @property
    def tokens(self) -> list[int]:
        return [*self._prompt, *self._output]

    def whole(self, body: bytes) -> bytes:
        """A complete JSON answer, as the client may see it."""
        fields = parsed(body)
        self._note(fields)
        return body if self._asked or not fields else orjson.dumps(_without_ids(fields))

    def events(self, events: bytes) -> bytes:
        """Events of a stream, as the client may see them."""
        return b"".join(map(self._event, split_events(events)))

    def _event(self, event: bytes) -> bytes:
        data = data_of(event) if any(key in event for key in _IDS) else None
        fields = parsed(data) if data else {}
        if not fields:
            return event
        self._note(fields)
        return event if self._asked else event_of(orjson.dumps(_without_ids(fields)))

    def _note(self, fields: dict[str, Any]) -> None:
        told = fields.get("kv_transfer_params")
        if isinstance(told, dict) and told:
            self.parameters = told
        for place in (fields, *(fields.get("choices") or ())):
            self._prompt = place.get("prompt_token_ids") or self._prompt
            self._output += place.get("token_ids") or ()


def _without_ids(fields: dict[str, Any]) -> dict[str, Any]:
    clean = {key: value for key, value in fields.items() if key != "prompt_token_ids"}
    clean["choices"] = [
        {key: value for key, value in choice.items() if key not in ("token_ids", "prompt_token_ids")}
        for choice in fields.get("choices") or ()
    ]
    return clean
