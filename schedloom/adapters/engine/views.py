"""vLLM's scheduler and requests, as policies see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from schedloom.adapters.engine.peers import LoadBoard
from schedloom.adapters.engine.pool import VllmPoolView
from schedloom.core.views import BatchReport, PeerLoad, ReusableKV
from schedloom.core.wire import is_local_attempt, job_class

CacheHit = tuple[Any, int, int, bool]


def is_marked(request: Any) -> bool:
    """Whether the router marked this vLLM request as a local attempt."""
    parameters = request.sampling_params
    return parameters is not None and is_local_attempt(parameters.extra_args)


def is_prefilling(request: Any) -> bool:
    """Whether this running request has more to compute than a decode has: the last token of a prompt alone is none."""
    return bool(request.is_prefill_chunk) and request.num_tokens - request.num_computed_tokens > 1


def job_class_of(request: Any) -> str | None:
    parameters = request.sampling_params
    return None if parameters is None else job_class(parameters.extra_args)


class VllmRequestView:
    """A vLLM ``Request``."""

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    def request_id(self) -> str:
        return self.raw.request_id  # type: ignore[no-any-return]

    @property
    def num_prompt_tokens(self) -> int:
        return self.raw.num_prompt_tokens  # type: ignore[no-any-return]

    @property
    def num_output_tokens(self) -> int:
        return self.raw.num_output_tokens  # type: ignore[no-any-return]

    @property
    def num_preemptions(self) -> int:
        return self.raw.num_preemptions  # type: ignore[no-any-return]

    @property
    def num_computed_tokens(self) -> int:
        return self.raw.num_computed_tokens  # type: ignore[no-any-return]

    @property
    def is_local_attempt(self) -> bool:
        return is_marked(self.raw)

    @property
    def job_class(self) -> str | None:
        return job_class_of(self.raw)

    @property
    def session(self) -> str | None:
        return self.raw.session_id  # type: ignore[no-any-return]


class VllmEngineView:
    """A vLLM ``Scheduler`` and its KV connector, through the interfaces that vLLM gives them.

    A look-up that was made while a request is being admitted is handed to vLLM's own look-up, which follows in the
    same iteration of its loop, so that no prefix is walked twice.
    """

    __slots__ = (
        "_hit",
        "_hit_of",
        "_num_decoding",
        "_num_prefilling",
        "_pool",
        "_scheduler",
        "_throttled",
        "board",
        "clock",
        "last_batch",
    )

    def __init__(self, scheduler: Any) -> None:
        self.board: LoadBoard | None = None
        self.last_batch = BatchReport()
        self.clock: Callable[[], float] = time.monotonic
        self._scheduler = scheduler
        self._pool: VllmPoolView | None = None
        self._hit: CacheHit | None = None
        self._hit_of: Any = None
        self._num_decoding: int | None = None
        self._num_prefilling: int | None = None
        self._throttled = False

    @property
    def now(self) -> float:
        return self.clock()

    @property
    def block_size(self) -> int:
        return self._scheduler.block_size  # type: ignore[no-any-return]

    @property
    def num_decoding(self) -> int:
        # A request that joins in the middle of a step is not known to be prefilled yet, and must not pass for a stream.
        if self._num_decoding is None:
            self._num_decoding = len(self._scheduler.running) - self.num_prefilling
        return self._num_decoding

    @property
    def num_prefilling(self) -> int:
        if not self._scheduler._inflight_prefills:
            return 0
        if self._num_prefilling is None:
            self._num_prefilling = sum(map(is_prefilling, self._scheduler.running))
        return self._num_prefilling

    @property
    def prefill_throttled(self) -> bool:
        return self._throttled and not self._scheduler.prefill_capacity_bound

    @property
    def pool(self) -> VllmPoolView:
        if self._pool is None:
            self._pool = VllmPoolView(self._scheduler.kv_cache_manager)
        return self._pool

    @property
    def peers(self) -> Sequence[PeerLoad]:
        return self.board.peers() if self.board else ()

    def num_active(self, job_classes: Collection[str]) -> int:
        scheduler = self._scheduler
        # A load that begins in this step stands in no queue before the step is over, but among the prefills already.
        # One that has failed is still among them, and holds nothing.
        loading = {*scheduler.kv_holding_waiting, *scheduler._inflight_prefills}
        # One that was preempted comes back before all others; while it is saved it stands in no queue that shows it.
        holding = {*scheduler.running, *filter(self.has_blocks, loading), *scheduler.preempted.values()}
        named = [one for one in holding if (given := one.sampling_params) is not None and given.extra_args]
        return sum(job_class_of(request) in job_classes for request in named)

    def begin_step(self, throttle_prefills: bool) -> None:
        self._num_decoding = self._num_prefilling = None
        self._throttled = throttle_prefills

    def reusable_kv(self, request: VllmRequestView, enough: int | None = None) -> ReusableKV:
        hit = self._local_hit(request.raw)
        resident = hit[1] - hit[1] % self.block_size
        if enough is not None and resident >= enough and not hit[3]:
            return ReusableKV(resident, 0)
        restorable = self._restorable(request.raw, resident)
        if hit[3] and not restorable:
            resident = self._agreed_hit(request.raw)
        return ReusableKV(resident, restorable)

    def has_blocks(self, request: Any) -> bool:
        return any(self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks)

    def take_hit(self, request: Any) -> CacheHit | None:
        """The look-up remembered for ``request``, at most once."""
        hit = self._hit if self._hit_of is request else None
        self.forget()
        return hit

    def forget(self) -> None:
        self._hit = self._hit_of = None

    def _local_hit(self, request: Any) -> CacheHit:
        if self._hit_of is not request or self._hit is None:
            self._hit = self._scheduler.look_up_local_prefix(request)
            self._hit_of = request
        return self._hit

    def _agreed_hit(self, request: Any) -> int:
        """Resident tokens on which all KV cache groups of a hybrid model agree."""
        tokens: int = self._scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        return tokens - tokens % self.block_size

    def _restorable(self, request: Any, resident: int) -> int | None:
        connector = self._scheduler.connector
        if connector is None or request.skip_reading_prefix_cache:
            return 0
        return connector.get_num_new_matched_tokens(request, resident)[0]  # type: ignore[no-any-return]
