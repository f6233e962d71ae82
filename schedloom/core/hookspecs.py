"""The extension points of schedloom.

Every hook is called with keyword arguments; an implementation names only those that it wants. Hooks are resolved once,
when a composition is made, into tuples of plain callables: no plugin machinery runs per request or per step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from schedloom.core.decisions import Admission, Lane, Recovery, StepOutcome, StepPlan
    from schedloom.core.routing import (
        Attempt,
        AttemptReport,
        Candidate,
        FleetView,
        Leg,
        RouteRequest,
        RoutingView,
        SessionOwner,
    )
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

    @hookspec
    def queue_key(self, request: RequestView, view: EngineView) -> Lane | None:
        """Name the lane of the waiting queue in which this request, which has just arrived, is to wait.

        Called once for each request, before the first step that could admit it; ``None`` is the lane without delay.
        Within a lane who came first goes first. Between lanes goes first who would have come first, had everyone come
        later by the delay of his lane: nobody ever waits behind a request that came more than that after him.
        Preempted requests go before all lanes. At most one policy of a composition may implement this hook, and none
        where vLLM itself orders its queue by priority.
        """

    @hookspec
    def recover(self, request: RequestView, view: EngineView) -> Sequence[Recovery] | None:
        """Name the ways that may take this running request's KV.

        Called when the engine is about to preempt the request because it lacks KV blocks, never when it preempts to
        reset its prefix cache. The ways that all policies name are tried in the order of ``Recovery``: one that proves
        impossible, before it had any effect, falls to the next, and vLLM's own RECOMPUTE stands at the end.
        """

    @hookspec
    def limit_tokens(self, request: RequestView, tokens: int, view: EngineView) -> int | None:
        """At most this many tokens of the request's prefill in this step; 0 skips it; ``None`` sets no limit.

        ``tokens`` is what the engine would compute. Called for prefill only, never for a decoding request, and not at
        all in a step without prefill. The least answer wins. Of a model with Mamba layers a chunk ends where a block
        does: with a block at least, unless the answer is 0.
        """

    @hookspec
    def plan_step(self, view: EngineView) -> StepPlan | None:
        """Say what the batch of the step that begins may hold; ``None`` is whatever vLLM puts into it.

        Who is left out waits where he is, running or not, with his KV. A decoding request is left out or gets all its
        tokens, speculative ones included. What became of the plan is in ``view.last_batch`` of the next step. At most
        one policy of a composition may implement this hook. While ``view.prefill_throttled`` a prefill batch is empty
        as long as anybody decodes.
        """

    @hookspec
    def request_finished(self, request: RequestView, view: EngineView) -> None:
        """A request has ended, by itself or by an abort, and still holds its KV blocks: the engine frees them next."""

    @hookspec
    def step_begin(self, view: EngineView) -> None:
        """A scheduling step begins."""

    @hookspec
    def step_end(self, outcome: StepOutcome, view: EngineView) -> None:
        """The output of a step has been processed."""


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

    @hookspec
    def filter_workers(
        self, request: RouteRequest, leg: Leg, candidates: Sequence[Candidate], view: RoutingView
    ) -> Collection[Candidate] | None:
        """Name those of ``candidates`` that may serve this leg; ``None`` keeps them all.

        ``candidates`` are healthy, not full and not avoided after a failure, where any such are left. Filters are asked
        in the order of their policies' names, each about what the one before left. For PREFILL and DECODE a filter
        that would leave nobody is passed over: no request is refused by one. For APPEND the only candidate is the one
        that a plan names, and leaving it out means that the local attempt is not made.
        """

    @hookspec
    def score_workers(
        self, request: RouteRequest, leg: Leg, candidates: Sequence[Candidate], view: RoutingView
    ) -> Sequence[float] | None:
        """Say how well each of ``candidates`` suits this leg, from 0 to 1 and in their order; ``None`` is no opinion.

        The highest sum wins, in which each policy's score counts by the ``weight`` among its settings, or by 1. Equal
        sums go to the least busy, and among equally busy ones to each in turn.
        """

    @hookspec
    def attempt_finished(self, request: RouteRequest, report: AttemptReport, view: RoutingView) -> None:
        """An attempt on one worker has ended, one way or another. Learn from it."""


SPECIFICATIONS = (EngineHooks, RouterHooks)
