"""KV that is to be written to a Decoder which has no room for it yet: kept for as long as the Decoder waits.

A Decoder that waits names the request to its Prefiller, again and again, and the Prefiller's lease is renewed. Where KV
is pulled, the Prefiller's own answer has told that name. Where it is written nobody can tell it, because the Decoder is
asked before that answer, and vLLM puts a random part behind every id. There the router has the Decoder name what it
gave itself, and the Prefiller's request is the one whose id contains it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from schedloom.adapters.engine.connector_loading import when_loaded

logger = logging.getLogger("vllm.schedloom")

CONNECTOR = "NixlPushConnector"
MARK = "finds_what_the_router_gave"

_GIVEN = re.compile(r"[0-9a-f]{32}")
"""What the router makes of a request id."""


def install() -> None:
    """Look after the connector's class when vLLM loads it. May be called any number of times in one process."""
    when_loaded(CONNECTOR, _renew_what_is_named_in_part)


def _renew_what_is_named_in_part() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker as Worker

    stock = getattr(Worker, "_handle_heartbeat", None)
    if stock is None:
        logger.warning("this vLLM renews no leases: KV for a Decoder without room is gone when its lease is over")
    elif not hasattr(stock, MARK):

        def handle_heartbeat(self: Any, payload: str) -> None:
            stock(self, ",".join(_named(self._reqs_to_send, payload)))

        setattr(handle_heartbeat, MARK, True)
        Worker._handle_heartbeat = handle_heartbeat


def _named(kept: Iterable[str], payload: str) -> list[str]:
    """Requests whose KV is kept and that ``payload`` names, by their whole id or by what the router gave of it."""
    names = set(payload.split(","))
    return [one for one in kept if one in names or not names.isdisjoint(_GIVEN.findall(one))]
