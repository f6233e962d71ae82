"""One engine on the bench: a real scheduler, a runner model, and the fabric between engines."""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from schedloom.adapters.engine.laboratory import setup
from schedloom.adapters.engine.laboratory.books import Books
from schedloom.adapters.engine.laboratory.decisions import DecisionTap
from schedloom.adapters.engine.laboratory.drafting import Drafting, DraftPlan
from schedloom.adapters.engine.laboratory.fabric import Fabric
from schedloom.adapters.engine.laboratory.probe import Preemption, Probe
from schedloom.adapters.engine.laboratory.protocols import RunnerV1, RunnerV2
from schedloom.adapters.engine.laboratory.ranks import Ranks
from schedloom.adapters.engine.laboratory.runner import Plan, Runner
from schedloom.adapters.engine.laboratory.store import Arithmetic, Store
from schedloom.adapters.engine.mended import Mended
from schedloom.adapters.engine.parts.recovery import preemption_stores
from schedloom.core.continuation import CONTINUABLE_KEY, RESUME_KEY, Ticket
from schedloom.core.wire import JOB_CLASS_KEY, LOCAL_ATTEMPT_KEY, PROTOCOL_VERSION

RUNNERS = {"v1": RunnerV1, "v2": RunnerV2}


@dataclass(slots=True)
class Output:
    """What a client gets in one step: tokens, and at the end a reason. ``read`` is the state behind the last token."""

    request_id: str
    tokens: list[int]
    finish_reason: str | None
    stop_reason: Any
    read: int | None


@dataclass(slots=True)
class Report:
    """One step.

    ``scheduled`` counts tokens, and ``left`` those that each scheduled request had to compute, one of which is decode;
    ``admitted`` maps a request that (re)joins to its tokens already computed; ``blocks`` are those that each request
    was given of each KV cache group, by (re)joining, as it grew or for a load; ``zeroed`` counts blocks, and
    ``refreshed`` are those that were put off from eviction; ``counted`` are the requests that entered the statistics
    of the prefix cache, ``saved`` the preempted ones whose KV is kept, with their computed tokens; ``streams`` those
    that ran before the step and had a token at most to compute, and ``prefilling`` counts the others; ``outputs`` is
    what came out of the oldest step in flight, or None when none was finished, ``sampled`` those for whom it sampled;
    ``now`` is the laboratory's clock.
    """

    scheduled: dict[str, int] = field(default_factory=dict)
    admitted: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    outputs: list[Output] | None = None
    sampled: list[str] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    zeroed: int = 0
    left: dict[str, int] = field(default_factory=dict)
    streams: list[str] = field(default_factory=list)
    prefilling: int = 0
    saved: list[tuple[str, int]] = field(default_factory=list)
    refreshed: list[int] = field(default_factory=list)
    now: float = 0.0


class Engine(Books):
    """Steps a scheduler as vLLM's engine core does: with one batch in flight, or two with asynchronous scheduling.

    A step's device work runs as late as it may: when its output is awaited. ``synchronise`` lets it run at once.
    """

    def __init__(self, cell: Any, chain: Any, policies: Any, faults: Iterable[type] = ()) -> None:
        init_none_hash(sha256)
        arithmetic = Arithmetic(chain, cell.max_model_len)
        self.store = Store(cell.num_blocks, max(group.block_size for group in cell.groups), cell.seed)
        self.fabric = Fabric(self.store, arithmetic, cell)
        config = setup.vllm_config(cell, self.fabric.number)
        super().__init__(setup.make_scheduler(_class(cell, config, policies, faults), cell, config))
        self.scheduler.watch()
        self._clock = 0.0
        if policies is not None:
            self.scheduler.view.clock = lambda: self._clock
        drafting = (Drafting,) if cell.drafts else ()
        runner = type("Runner", (*of_target(faults, "runner"), *drafting, RUNNERS[cell.runner]), {})
        self.runner: Runner = runner(self.store, arithmetic, cell)
        self.runner.starts = self.fabric.starts
        self.ranks = Ranks(self.scheduler, lambda: self._clock) if policies is not None else None
        for store in preemption_stores(self.scheduler.connector):
            store._scheduler._clock = lambda: self._clock
        self._silence = 0
        self._chain = chain
        self.depth = 2 if cell.asynchronous else 1
        self.decisions = DecisionTap()
        self._worker: Any = self._worker_connector(config) if cell.connects else None
        # Copies to and from the host are ordered after the device's work; what comes over a network is not.
        self._ordered_copies = bool(cell.offload)
        self.runner.handle_preemptions = self._handle_preemptions
        self._hasher = get_request_block_hasher(setup.block_sizes(cell)[1], sha256)
        self._in_flight: deque[tuple[Any, Plan, Any]] = deque()
        self._retold: dict[str, int] = {}

    def _worker_connector(self, config: Any) -> Any:
        worker = KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=self.scheduler.kv_cache_config
        )
        memory = torch.from_numpy(self.store.slots.view(np.int64))
        names = map(setup.layer_name, range(len(self.scheduler.kv_cache_config.kv_cache_groups)))
        worker.register_kv_caches(dict.fromkeys(names, memory))
        return worker

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        self.fabric.close()
        self.decisions.close()

    # What happens to an engine

    def add(self, order: Any) -> None:
        self._clock = order.arrival
        extra: dict[str, Any] = {}
        if order.marked:
            extra[LOCAL_ATTEMPT_KEY] = PROTOCOL_VERSION
        told = self._mark_continuable(order, extra)
        if order.transfer == "receive":
            extra["kv_transfer_params"] = {"do_remote_prefill": True}
        if order.job_class is not None:
            extra[JOB_CLASS_KEY] = order.job_class
        if order.transfer == "send":
            extra["kv_transfer_params"] = {"do_remote_decode": True}
        if order.fast:
            self.fabric.fast.add(order.request_id)
        if order.transfer:
            self.fabric.prompts[order.request_id] = [*order.prompt, *told]
        self.fabric.starts[order.request_id] = self._chain.start_of(order.salt, order.adapter)
        sampling = SamplingParams(
            ignore_eos=True,
            max_tokens=order.max_tokens,
            temperature=0,
            seed=7 if order.seeded else None,
            extra_args=extra or None,
        )
        request = Request(
            request_id=order.request_id,
            prompt_token_ids=list(order.prompt),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=order.salt,
            lora_request=_adapter(order.adapter) if order.adapter else None,
            session_id=order.session,
            priority=order.priority,
            arrival_time=order.arrival,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def resident(self, order: Any) -> int:
        """The tokens of ``order``, which the engine does not know any more, of which it holds KV."""
        request = Request(
            request_id=f"{order.request_id} again",
            prompt_token_ids=list(order.prompt),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=order.salt,
            lora_request=_adapter(order.adapter) if order.adapter else None,
            block_hasher=self._hasher,
        )
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    def _mark_continuable(self, order: Any, extra: dict[str, Any]) -> Sequence[int]:
        """Put the router's marks into ``extra``, and return what the request will tell again."""
        if order.continuable:
            extra[CONTINUABLE_KEY] = PROTOCOL_VERSION
        if order.ticket is None:
            return ()
        extra[RESUME_KEY] = order.ticket
        told = Ticket.read(order.ticket).output
        self._retold[order.request_id] = len(told)
        return told

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self._clock += seconds

    def pause(self, state: str) -> None:
        """``state`` is a name of vLLM's PauseState."""
        self.scheduler.set_pause_state(PauseState[state])

    def crowd(self, running: int, kv_usage: float) -> None:
        """Another data-parallel rank tells its load, where somebody listens."""
        if self.ranks is not None:
            self.ranks.tell(running, kv_usage)

    def silence(self, steps: int) -> None:
        """For so many steps nobody hears from the workers which saves are done."""
        self._silence = steps

    @property
    def silent(self) -> bool:
        return self._silence > 0

    def step(self, throttled: bool = False) -> Report:
        """Dispatch a step if there is anything to do, and finish the oldest one in flight when the queue is full."""
        report = self._dispatch(throttled) if self.scheduler.has_requests() else Report()
        if self._in_flight and (len(self._in_flight) >= self.depth or not report.scheduled):
            output, plan, transferred = self._in_flight.popleft()
            report.sampled = plan.sampling_ids
            report.outputs = self._finish(output, plan, transferred)
        report.preemptions, self.scheduler.preemptions = self.scheduler.preemptions, []
        report.counted, self.scheduler.counted = self.scheduler.counted, []
        report.saved, self.scheduler.saved = self.scheduler.saved, []
        report.refreshed, self.scheduler.refreshed = self.scheduler.refreshed, []
        return report

    def synchronise(self) -> None:
        self.runner.synchronise()

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        """Raises RuntimeError where vLLM does: running requests were reset and others still hold KV."""
        return bool(self.scheduler.reset_prefix_cache(running, connector))

    def squeeze(self, blocks: int) -> int:
        """Take up to ``blocks`` free blocks away, evicting what was cached in them."""
        pool = self.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(min(blocks, pool.get_num_free_blocks()))
        self.held.extend(taken)
        return len(taken)

    def relax(self) -> None:
        held, self.held = self.held, []
        self.scheduler.kv_cache_manager.block_pool.free_blocks(held)

    def settle(self, request_id: str, failed: bool) -> str | None:
        """End a transfer. A word on what is wrong with where its KV went or came from, or None."""
        transfer = self.fabric.under_way[request_id]
        tables = self.blocks_of(request_id) if request_id in self.scheduler.requests else ()
        if not set().union(*tables).issuperset(self.fabric.blocks_of(transfer)):
            return "blocks of its transfer went to somebody else before it was over"
        self.fabric.settle(request_id, failed)
        return "its KV was overwritten before it was sent" if request_id in self.fabric.corrupt else None

    # One step

    def _dispatch(self, throttled: bool) -> Report:
        running = len(self.scheduler.running)
        streams = [one.request_id for one in self.scheduler.running if one.num_tokens - one.num_computed_tokens <= 1]
        output = self.scheduler.schedule(throttled)
        worker = self._worker
        if worker is not None:
            worker.bind_connector_metadata(output.kv_connector_metadata)
        plan = self.runner.dispatch(output)
        transferred = self._transfer(output.finished_req_ids) if worker is not None else None
        self._in_flight.append((output, plan, transferred))
        report = _report(output)
        report.streams, report.prefilling, report.now = streams, running - len(streams), self._clock
        report.left = self._left(output.num_scheduled_tokens)
        loading, self.scheduler.loading = self.scheduler.loading, []
        report.blocks |= {request_id: self.blocks_of(request_id) for request_id in loading}
        return report

    def _left(self, scheduled: dict[str, int]) -> dict[str, int]:
        pairs = ((self.scheduler.requests[name], count) for name, count in scheduled.items())
        return {one.request_id: one.num_tokens - one.num_computed_tokens + count for one, count in pairs}

    def _handle_preemptions(self, output: Any) -> None:
        if self._worker is not None:
            if self._ordered_copies:
                self.runner.synchronise()
            self._worker.handle_preemptions(output.kv_connector_metadata)

    def _transfer(self, finished: set[str]) -> KVConnectorOutput:
        if self._ordered_copies:
            self.runner.synchronise()
        self._worker.start_load_kv(None)
        results = self._worker.get_transfer_results(finished)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self._worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self._reported(self._worker.build_connector_worker_meta()),
        )
        self._worker.clear_connector_metadata()
        return output

    def _reported(self, report: Any) -> Any:
        if not self._silence:
            return report
        self._silence -= 1
        return None

    def _finish(self, output: Any, plan: Plan, transferred: Any) -> list[Output]:
        self.runner.synchronise(plan)
        sampled = dict(zip(plan.sampling_ids, plan.sampled, strict=True))
        names = plan.request_ids
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[sampled.get(name, []) for name in names],
            pooler_output=[],
            kv_connector_output=transferred,
        )
        reads = dict(zip(plan.sampling_ids, plan.reads, strict=True))
        clients = self.scheduler.update_from_output(output, result)
        if isinstance(plan, DraftPlan) and self.depth == 1:
            drafts = [plan.proposed.get(name, []) for name in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        return [
            Output(
                out.request_id,
                out.new_token_ids,
                None if out.finish_reason is None else str(out.finish_reason),
                out.stop_reason,
                self._last_read(out, reads),
            )
            for client in clients.values()
            for out in client.outputs
        ]

    def _last_read(self, out: Any, reads: dict[str, list[int]]) -> int | None:
        """The state behind the last of its new tokens, those aside that it tells again."""
        new = len(out.new_token_ids)
        if self._retold and new:
            new -= self._retold.pop(out.request_id, 0)
        known = reads.get(out.request_id, [])
        return known[new - 1] if 0 < new <= len(known) else None

    # What can be seen of it

    @property
    def drafts(self) -> tuple[int, int]:
        """How many were accepted and how many rejected so far."""
        return (self.runner.accepted, self.runner.rejected) if isinstance(self.runner, Drafting) else (0, 0)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or bool(self.scheduler.has_requests())

    @property
    def transfers(self) -> list[str]:
        return list(self.fabric.under_way)

    @property
    def published(self) -> list[dict[str, Any]]:
        """The decisions published since this was last read."""
        taken, self.decisions.taken = self.decisions.taken, []
        return taken


def _adapter(number: int) -> LoRARequest:
    return LoRARequest(lora_name=f"adapter {number}", lora_int_id=number, lora_path=f"/adapters/{number}")


def _report(output: Any) -> Report:
    report = Report(output.num_scheduled_tokens, zeroed=len(output.new_block_ids_to_zero or ()))
    for new in output.scheduled_new_reqs:
        report.admitted[new.req_id] = new.num_computed_tokens
        report.blocks[new.req_id] = new.block_ids
    cached = output.scheduled_cached_reqs
    for request_id, blocks, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if blocks is not None:
            report.blocks[request_id] = blocks
        if request_id in cached.resumed_req_ids:
            report.admitted[request_id] = computed
    return report


def _class(cell: Any, config: Any, policies: Any, faults: Iterable[type]) -> type:
    from schedloom.adapters.engine.contract import describe_engine
    from schedloom.adapters.engine.scheduler import composed
    from schedloom.core.requirements import check_requirements

    base = setup.stock_class(cell)
    if policies is not None:
        check_requirements(policies.policies, describe_engine(config))
        base = composed(base, policies)
    # vLLM's own scheduler is compared with, and what is known to be wrong in it would be all that differs.
    exact = () if policies is not None else (Mended,)
    return type(f"Watched{base.__name__}", (Probe, *of_target(faults, "scheduler"), *exact, base), {})


def of_target(faults: Iterable[type], target: str) -> tuple[type, ...]:
    """The mutant mix-ins that go before the laboratory's scheduler, or before its runner."""
    kinds = [
        (fault, "policy" if hasattr(fault, "policy") else getattr(fault, "target", "scheduler")) for fault in faults
    ]
    return tuple(fault for fault, kind in kinds if kind == target)


def quiet() -> None:
    """Leave the log to what is worth a person's time: the laboratory provokes thousands of handled failures. And leave
    what vLLM has loaded out of every garbage collection, as its engine core does."""
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    gc.collect()
    gc.freeze()
