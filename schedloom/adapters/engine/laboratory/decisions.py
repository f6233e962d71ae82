"""The decisions that an engine's policies publish, taken where operators take them: from the log."""

from __future__ import annotations

import logging
from typing import Any

import orjson

_LOGGER = logging.getLogger("vllm.schedloom.decisions")


class DecisionTap(logging.Handler):
    """Collects published decisions as the mappings that a log reader would get."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[dict[str, Any]] = []
        _LOGGER.setLevel(logging.DEBUG)
        _LOGGER.propagate = False
        _LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.taken.append(orjson.loads(record.getMessage()))

    def close(self) -> None:
        _LOGGER.removeHandler(self)
        super().close()
