"""A process that the demo starts beside its engines, ended with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from schedloom.demo.engines import LOG_LINES_IN_ERRORS, keep, stop

POLL_SECONDS = 0.05


class ServiceFailed(Exception):
    """A service ended, or was not ready in time; carries the last lines of its log."""


class Service:
    """``with Service(name, command, logs, ready): ...``: the command runs inside the context and not after it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        logs: Path,
        ready: Callable[[], bool],
        patience_seconds: float = 30.0,
    ) -> None:
        self._name = name
        self._command = command
        self._log = logs / f"{name}.log"
        self._ready = ready
        self._patience_seconds = patience_seconds

    def __enter__(self) -> Service:
        self._process = keep(self._command, self._log)
        try:
            self._wait()
        except BaseException:
            stop(self._process)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop(self._process)

    def _wait(self) -> None:
        deadline = time.monotonic() + self._patience_seconds
        while not self._ready():
            status = self._process.poll()
            if status is not None:
                raise self._failure(f"ended with status {status}")
            if time.monotonic() > deadline:
                raise self._failure(f"was not ready after {self._patience_seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def _failure(self, what: str) -> ServiceFailed:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES_IN_ERRORS:]
        return ServiceFailed("\n".join([f"The {self._name} {what}; the end of {self._log}:", *lines]))
