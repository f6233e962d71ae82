"""The extension points of schedloom.

Every hook is called with keyword arguments; an implementation names only those that it wants. Hooks are resolved once,
when a composition is made, into tuples of plain callables: no plugin machinery runs per request or per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from schedloom.core.decisions import Admission
    from schedloom.core.routing import Attempt, FleetView, RouteRequest, SessionOwner
    from schedloom.core.views import EngineView, RequestView

PROJECT = "schedloom"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class EngineHooks:
    """Called inside an engine, while its scheduler runs. Implementations must not block, do I/O or start threads."""

    @hookspec
    def admit(self, request: RequestView, view: EngineView) -> Admission | None:
        """Decide on a waiting request that the engine is about to give KV blocks for the first time.

        Called in the very iteration of the scheduling loop that would allocate the blocks, after the engine itself
        called the request ready, and never for a request that has computed tokens, output or a preemption behind it.
        The strictest answer of all policies wins; ``None`` means no opinion. REJECT has an effect only on a request
        that carries the router's mark: it is ended with no output, as if it had never come.
        """

    @hookspec
    def screen(self, request: RequestView, view: EngineView) -> Admission | None:
        """Decide early on a marked request anywhere in the waiting queue, so that a hopeless one is told at once.

        Called once at the end of the first step after the request arrived, and for requests that stay in the queue
        again from time to time. Only REJECT has an effect; anything else leaves the request to ``admit``.
        """


class RouterHooks:
    """Called inside the router, while a request is routed."""

    @hookspec
    def plan_route(
        self, request: RouteRequest, owner: SessionOwner | None, fleet: FleetView
    ) -> Sequence[Attempt] | None:
        """Name the attempts worth making before ordinary prefill/decode, which always stands at the end of the plan.

        ``owner`` is the Decoder instance and data-parallel rank that served this session's last successful turn, or
        ``None`` when there is no session, no earlier turn, or the instance has gone or restarted since.
        """


SPECIFICATIONS = (EngineHooks, RouterHooks)
