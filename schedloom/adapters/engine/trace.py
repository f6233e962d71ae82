"""Where an engine's decisions go."""

from __future__ import annotations

import logging

import orjson

from schedloom.core.decisions import Decision

logger = logging.getLogger("vllm.schedloom.decisions")


class LogSink:
    """One JSON object a line, through vLLM's own logging set-up."""

    def record(self, decision: Decision) -> None:
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", as_line(decision))


def as_line(decision: Decision) -> str:
    fields = {
        "request_id": decision.request_id,
        "policy": decision.policy,
        "hook": decision.hook,
        "decision": decision.verdict,
        "reason": decision.reason,
        **decision.facts,
    }
    return orjson.dumps(fields).decode()
