"""What engines say of the KV that they keep, or have room for."""

from __future__ import annotations

from typing import Any

from schedloom.router.sse import parsed

Parameters = dict[str, Any]
"""As it travels from one engine to another."""


def transfer_parameters(body: bytes) -> Parameters | None:
    """What an engine's JSON answer says about the KV that it keeps."""
    parameters = _member_near_the_end(body) or parsed(body).get("kv_transfer_params")
    return parameters if isinstance(parameters, dict) and parameters else None


def _member_near_the_end(body: bytes) -> Parameters:
    """The transfer parameters where only plain members of an answer follow them, as of vLLM's; otherwise empty.

    Within a JSON string the quotes would be escaped, and behind a member of another object more would be closed.
    """
    _, _, rest = body.rpartition(b',"kv_transfer_params":')
    value, found, others = rest.rpartition(b"},")
    plain = found and others.endswith(b"}") and others.count(b"}") == 1 and not others.count(b"]")
    return parsed(value + b"}") if plain else {}
