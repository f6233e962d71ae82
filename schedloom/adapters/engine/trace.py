"""Where an engine's decisions go: always into counters, and where somebody listens into a log or a file."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter

import orjson

from schedloom.core.decisions import Decision

FILE_VARIABLE = "SCHEDLOOM_DECISION_LOG"
"""Environment variable with a path: every decision of the engine is appended there, one JSON object a line."""

logger = logging.getLogger("vllm.schedloom.decisions")


class DecisionTrace:
    """Counts by policy, hook, verdict and reason; lines at level DEBUG of vLLM's log; lines of a file if so named."""

    def __init__(self, path: str | None = None) -> None:
        self.counts: Counter[tuple[str, str, str, str]] = Counter()
        path = path or os.environ.get(FILE_VARIABLE)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if path else None

    def record(self, decision: Decision) -> None:
        self.counts[decision.policy, decision.hook, decision.verdict, decision.reason] += 1
        if self._file is not None:
            self._write(self._file, decision)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", as_line(decision).decode())

    def _write(self, file: int, decision: Decision) -> None:
        try:
            os.write(file, as_line(decision) + b"\n")
        except OSError:
            self._file = None
            logger.exception("decisions can no longer be written to the file; they are still counted")


def as_line(decision: Decision) -> bytes:
    fields = {
        "request_id": decision.request_id,
        "policy": decision.policy,
        "hook": decision.hook,
        "decision": decision.verdict,
        "reason": decision.reason,
        **decision.facts,
    }
    try:
        return orjson.dumps(fields, default=str)
    except TypeError:  # It knows neither numbers of more than 64 bits, nor keys that are none, nor half a surrogate.
        return json.dumps(fields, default=str, skipkeys=True).encode()
