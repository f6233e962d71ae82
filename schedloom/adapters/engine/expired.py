"""KV that its Prefiller may keep no more when a Decoder is about to pull it: not pulled, it may be another's by now.

A Prefiller keeps KV for a lease, which a Decoder renews by heartbeats while the request waits there. A Decoder that
stood still sent none, and vLLM has it pull all the same. The last sign that the KV is kept is the later of the
request's arrival, shortly after the Prefiller answered, and of the last heartbeat that came in time. Where that is too
long ago when the request's turn comes, it is computed here; where the turn had come and the worker stood still, its
load fails.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Container
from typing import Any
from weakref import WeakKeyDictionary

from schedloom.adapters.engine.connector_loading import when_loaded

logger = logging.getLogger("vllm.schedloom")

CONNECTOR = "NixlPullConnector"
MARK = "knows_what_is_kept"

TRUSTED = 1 / 2
"""Of a lease: how long a sign is good for. A heartbeat is due each sixth, and good for two thirds where it arrives."""

clock = time.time
"""What the arrival of a request is told by."""

_SCHEDULER_SEAMS = ("on_new_request", "get_num_new_matched_tokens", "build_connector_meta", "_stop_heartbeat")
_WORKER_SEAMS = ("_read_blocks_for_req", "_handle_failed_transfer")


def install() -> None:
    """Look after the connector's classes when vLLM loads it. May be called any number of times in one process."""
    when_loaded(CONNECTOR, _pull_what_is_kept_only)


def _pull_what_is_kept_only() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler as Scheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker as Worker

    if hasattr(Scheduler, MARK):
        return
    setattr(Scheduler, MARK, True)
    if all(hasattr(Scheduler, seam) for seam in _SCHEDULER_SEAMS) and all(
        hasattr(Worker, one) for one in _WORKER_SEAMS
    ):
        _note_signs(Scheduler)
        _compute_what_may_be_gone(Scheduler)
        _tell_until_when(Scheduler)
        _fail_what_may_be_gone(Worker)
    else:
        logger.warning("this vLLM pulls KV by other means: a Decoder that stands still may read KV that is gone")


class Signs:
    """When each request's KV was last known to be kept by its Prefiller."""

    def __init__(self, lease: float) -> None:
        self._trusted = lease * TRUSTED
        self._last: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    def arrived(self, request: Any) -> None:
        self._last[request] = request.arrival_time

    def renew(self, named: Container[str]) -> None:
        """A heartbeat leaves now. It helps those that it names, unless it is too late for them."""
        now = clock()
        for request, last in list(self._last.items()):
            if request.request_id in named and now - last <= self._trusted:
                self._last[request] = now

    def until(self, request: Any) -> float:
        """When the KV may be gone."""
        return self._last.get(request, math.inf) + self._trusted

    def lose(self, request: Any) -> bool:
        """Whether that is new."""
        last, self._last[request] = self._last[request], -math.inf
        return last > -math.inf


def _signs(scheduler: Any) -> Signs:
    if not hasattr(scheduler, "schedloom_signs"):
        scheduler.schedloom_signs = Signs(scheduler._kv_lease_duration)
    signs: Signs = scheduler.schedloom_signs
    return signs


def _to_pull(request: Any) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))


def _note_signs(scheduler_class: Any) -> None:
    stock = scheduler_class.on_new_request

    def on_new_request(self: Any, request: Any) -> None:
        stock(self, request)
        if _to_pull(request):
            _signs(self).arrived(request)

    scheduler_class.on_new_request = on_new_request


def _compute_what_may_be_gone(scheduler_class: Any) -> None:
    stock = scheduler_class.get_num_new_matched_tokens

    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = stock(self, request, num_computed_tokens)
        if not found[0] or clock() <= _signs(self).until(request):
            return found
        _give_up(self, request)
        return 0, False

    scheduler_class.get_num_new_matched_tokens = get_num_new_matched_tokens


def _give_up(scheduler: Any, request: Any) -> None:
    """vLLM treats it as one whose whole prompt is here already: what the Prefiller may still keep is let go."""
    scheduler._stop_heartbeat(request.request_id)
    if _signs(scheduler).lose(request):
        logger.warning(
            "%s is computed here: this engine stood still, and its Prefiller may keep its KV no more; "
            "give kv_lease_duration (%s s) more than twice the longest step",
            request.request_id,
            scheduler._kv_lease_duration,
        )


def _tell_until_when(scheduler_class: Any) -> None:
    stock = scheduler_class.build_connector_meta

    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        pulled = {name: asked[0] for name, asked in self._reqs_need_recv.items()}
        metadata = stock(self, scheduler_output)
        for name, request in pulled.items():
            metadata.reqs_to_recv[name].kept_until = _signs(self).until(request)
        if metadata.heartbeat_by_engine:
            _signs(self).renew(self._heartbeat_req_engine)
        return metadata

    scheduler_class.build_connector_meta = build_connector_meta


def _fail_what_may_be_gone(worker_class: Any) -> None:
    stock = worker_class._read_blocks_for_req

    def read_blocks_for_req(self: Any, req_id: str, meta: Any) -> None:
        if req_id not in self._recving_metadata or clock() <= getattr(meta, "kept_until", math.inf):
            stock(self, req_id, meta)
            return
        logger.warning("the load of %s fails: this engine stood still, and the KV may be gone", req_id)
        self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)

    worker_class._read_blocks_for_req = read_blocks_for_req
