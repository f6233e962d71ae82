"""What routing policies learn from attempts that have ended."""

from __future__ import annotations

import re
from types import TracebackType
from typing import TYPE_CHECKING

from schedloom.core.composition import PolicySet
from schedloom.core.routing import AttemptReport, Ending, Leg
from schedloom.router.fleet.worker import Service
from schedloom.router.http.upstream import UpstreamResponse
from schedloom.router.requests.call import Call
from schedloom.router.selection import Excuses, View

if TYPE_CHECKING:
    from schedloom.router.dispatch import Dispatch

_TAIL_BYTES = 4096
"""An answer's usage stands within so many bytes of its end."""

_FULL = (429, 503)
_TOKENS = {
    name: re.compile(rb'"%b"\s*:\s*(\d+)' % name.encode())
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
}


class Lessons:
    """Tells policies how attempts ended. Without a policy that wants to know (``are_wanted``), nothing is measured."""

    def __init__(self, policies: PolicySet, excuses: Excuses, view: View) -> None:
        self._pupils = policies.of("attempt_finished")
        self.are_wanted = bool(self._pupils)
        self._excuses = excuses
        self._view = view

    def observed(self, call: Call, dispatch: Dispatch, leg: Leg) -> Service:
        """Counts an attempt while it lasts, and tells policies of its end, and the call's trace if it has one."""
        return _Observed(self, call, dispatch, leg)

    def now(self) -> float:
        return self._view.now

    def tell(self, call: Call, report: AttemptReport) -> None:
        for hook in self._pupils:
            try:
                hook.call(call, report, self._view)
            except Exception:
                self._excuses.note(hook.policy, "learn from an attempt")


class _Observed(Service):
    """A service that writes down how it went."""

    def __init__(self, lessons: Lessons, call: Call, dispatch: Dispatch, leg: Leg) -> None:
        target = dispatch.target
        super().__init__(target.worker, target.rank, call.body_bytes)
        self._lessons = lessons
        self._call = call
        self._target = target
        self._leg = leg
        self._trace = None
        if call.trace is not None:
            self._trace = call.trace.attempt(leg.value, target.name, target.rank, dispatch.request_id)
            dispatch.lines += (self._trace.lines,)
        self._begun = 0.0
        self._before = (0, 0)
        self._first_byte: float | None = None
        self._status = 0
        self._tail = b""

    def __enter__(self) -> Service:
        self._begun = self._lessons.now()
        self._before = (self._target.in_flight, self._target.in_flight_bytes)
        return super().__enter__()

    def answered(self, response: UpstreamResponse) -> UpstreamResponse:
        self._first_byte = self._lessons.now() - self._begun
        self._status = response.status
        return _Listened(super().answered(response), self)

    def heard(self, chunk: bytes) -> None:
        self._tail = chunk if len(chunk) >= _TAIL_BYTES else (self._tail + chunk)[-_TAIL_BYTES:]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        report = self._report(kind)
        self._lessons.tell(self._call, report)
        if self._trace is not None:
            self._trace.end(report, self._status)

    def _report(self, kind: type[BaseException] | None) -> AttemptReport:
        prompt, cached, output = (_last(pattern, self._tail) for pattern in _TOKENS.values())
        return AttemptReport(
            leg=self._leg,
            candidate=self._target,
            ending=self._ending(kind),
            seconds=self._lessons.now() - self._begun,
            first_byte=self._first_byte,
            requests_before=self._before[0],
            bytes_before=self._before[1],
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
        )

    def _ending(self, kind: type[BaseException] | None) -> Ending:
        if self.success is False:
            return Ending.FAILED
        if self._status in _FULL:
            return Ending.FULL
        return Ending.ANSWERED if self.success and kind is None else Ending.LEFT


class _Listened(UpstreamResponse):
    """An answer that somebody listens to."""

    def __init__(self, response: UpstreamResponse, service: _Observed) -> None:
        self.status = response.status
        self.headers = response.headers
        self._response = response
        self._service = service

    @property
    def pieces(self) -> int:
        return self._response.pieces

    async def read(self) -> bytes:
        chunk = await self._response.read()
        self._service.heard(chunk)
        return chunk

    def close(self) -> None:
        self._response.close()


def _last(pattern: re.Pattern[bytes], tail: bytes) -> int | None:
    found = pattern.findall(tail)
    return int(found[-1]) if found else None
