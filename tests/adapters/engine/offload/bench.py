"""vLLM's real schedulers and our connector over a model that tells the truth about KV: one wrong block, wrong tokens.

The laboratory's runners keep the orders in which vLLM's two model runners zero, save, copy and compute. Copies run on a
lane that the test holds back as long as it likes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from schedloom.adapters.engine.laboratory import setup
from schedloom.adapters.engine.laboratory.fabric import Fabric
from schedloom.adapters.engine.laboratory.protocols import RunnerV1, RunnerV2
from schedloom.adapters.engine.laboratory.store import Arithmetic, Store
from schedloom.adapters.engine.offload import CONNECTOR, install
from schedloom.adapters.engine.scheduler import composed
from schedloom.conformance.cells import Cell
from schedloom.conformance.chain import Chain
from schedloom.core.composition import PolicyChoice, compose

BLOCK = 4
SLOT_BYTES = setup.kv_cache_config(Cell(block_size=BLOCK)).kv_cache_groups[0].kv_cache_spec.page_size_bytes
CHAIN = Chain()
POLICY = PolicyChoice(name="offload_restore", **{"min_saved_tokens": 1})


class HeldLane:
    """Copies run when the test says so, after everything that the device was given before them."""

    def __init__(self, synchronise: Callable[[], None]) -> None:
        self._synchronise = synchronise
        self._waiting: deque[tuple[int, Callable[[], None], list[bool]]] = deque()
        self._clock = 0
        self.delay = self.load_delay = 0
        self.fail = False
        self.loading = False

    def submit(self, work: Callable[[], None]) -> Callable[[], bool]:
        if self.fail:
            raise RuntimeError("no memory left")
        done: list[bool] = []
        delay = max(self.delay, self.load_delay) if self.loading else self.delay
        self._waiting.append((self._clock + delay, work, done))
        self.run()
        return lambda: bool(done)

    def tick(self) -> None:
        self._clock += 1
        self.run()

    def release(self) -> None:
        """Let everything that was held back run now."""
        self._waiting = deque((0, work, done) for _, work, done in self._waiting)
        self.run()

    def run(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._clock:
            self._synchronise()
            _, work, done = self._waiting.popleft()
            work()
            done.append(True)


@dataclass
class Setting:
    """One engine. ``host_slots``: blocks that host memory holds; ``beside``: the connector that stands before ours;
    ``others``: policies beside ``offload_restore``."""

    runner: Any = "v1"
    asynchronous: bool = False
    num_blocks: int = 25
    host_slots: int = 1000
    role: str = "kv_consumer"
    beside: str | None = None
    zeroing: bool = True
    prefix_caching: bool = True
    priority: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    others: tuple[PolicyChoice, ...] = ()

    def cell(self) -> Cell:
        return _Cell(
            runner=self.runner,
            asynchronous=self.asynchronous,
            zeroing=self.zeroing,
            prefix_caching=self.prefix_caching,
            priority=self.priority,
            blocks=self.num_blocks,
        )

    def transfer(self, fabric: int) -> KVTransferConfig:
        own = {
            "kv_connector": CONNECTOR,
            "kv_role": self.role,
            "kv_connector_extra_config": {"host_bytes": self.host_slots * SLOT_BYTES, **self.extra},
        }
        if self.beside is None:
            return KVTransferConfig(**own, kv_load_failure_policy="recompute")
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=self.role,
            kv_connector_extra_config={"connectors": [self._before_ours(fabric), own]},
            kv_load_failure_policy="recompute",
        )

    def _before_ours(self, fabric: int) -> dict[str, Any]:
        return {
            "kv_connector": self.beside,
            "kv_connector_module_path": setup.CONNECTOR_MODULE,
            "kv_role": self.role,
            "kv_connector_extra_config": {"fabric": fabric},
        }


@dataclass(frozen=True)
class _Cell(Cell):
    blocks: int = 25

    @property
    def num_blocks(self) -> int:
        return self.blocks


class Bench:
    """Steps as vLLM's engine core does, with one batch in flight or two."""

    def __init__(self, setting: Setting, *mixins: type) -> None:
        install()
        init_none_hash(sha256)
        cell = setting.cell()
        self.arithmetic = Arithmetic(CHAIN, cell.max_model_len)
        self.store = Store(cell.num_blocks, BLOCK, seed=1)
        self.fabric = Fabric(self.store, self.arithmetic, cell)
        config = setup.vllm_config(cell, 0)
        config.kv_transfer_config = setting.transfer(self.fabric.number)
        base = composed(setup.stock_class(cell), compose([POLICY, *setting.others]))
        self.scheduler = setup.make_scheduler(type("Scheduler", (*mixins, base), {}), cell, config)
        runner = RunnerV1 if setting.runner == "v1" else RunnerV2
        self.runner = runner(self.store, self.arithmetic, cell)
        self.runner.handle_preemptions = lambda output: self.worker.handle_preemptions(output.kv_connector_metadata)
        self.lane = HeldLane(self.runner.synchronise)
        self.worker = self._make_worker(config)
        self.depth = 2 if setting.asynchronous else 1
        self.in_flight: deque[Any] = deque()
        self.produced: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.restored: list[int] = []
        self.now = 0.0
        self.books._clock = lambda: self.now
        self._watch_restores()

    @property
    def connector(self) -> Any:
        return our_part(self.scheduler.connector)

    @property
    def books(self) -> Any:
        return self.connector._scheduler

    @property
    def counters(self) -> Any:
        return self.connector.counters

    def add(self, name: str, prompt_tokens: int, max_tokens: int, priority: int = 0, pulled: bool = False) -> None:
        prompt = [random.Random(name).randrange(1, 50_000) for _ in range(prompt_tokens)]
        self.prompts[name] = self.fabric.prompts[name] = prompt
        extra = {"kv_transfer_params": {"do_remote_prefill": True}} if pulled else None
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(ignore_eos=True, max_tokens=max_tokens, temperature=0, extra_args=extra),
            pooling_params=None,
            priority=priority,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.ended[name] = "abort"

    def step(self) -> Any:
        """One step; what other connectors pull arrives at its beginning."""
        for name in list(self.fabric.under_way):
            self.fabric.settle(name)
        scheduled = self.scheduler.schedule()
        self.worker.bind_connector_metadata(scheduled.kv_connector_metadata)
        plan = self.runner.dispatch(scheduled)
        self.lane.tick()
        self.worker.start_load_kv(None)
        self.in_flight.append((scheduled, plan, self._transferred(scheduled)))
        if len(self.in_flight) >= self.depth or not scheduled.num_scheduled_tokens:
            self._finish(*self.in_flight.popleft())
        return scheduled

    def settle(self) -> None:
        """Finish what is in flight, and schedule nothing new."""
        while self.in_flight:
            self._finish(*self.in_flight.popleft())

    def drain(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_requests():
                break
            self.step()
        assert not self.scheduler.has_requests(), f"left after {limit} steps: {list(self.scheduler.requests)}"
        self.settle()

    def until(self, condition: Callable[[], bool], limit: int = 500) -> None:
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError("it never happened")

    def phase_of(self, name: str) -> str | None:
        saved = self.books._requests.get(name)
        return saved.phase.name if saved else None

    def named(self, phase: str) -> str | None:
        """A request whose saved KV is in this phase."""
        return next((name for name, saved in self.books._requests.items() if saved.phase.name == phase), None)

    def wrong(self) -> list[str]:
        """Requests whose tokens are not those of an undisturbed run."""
        return [name for name, tokens in self.produced.items() if tokens != expected(self.prompts[name], len(tokens))]

    def leaks(self) -> dict[str, Any]:
        pool = self.scheduler.kv_cache_manager.block_pool
        found = {
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "references": sum(block.ref_cnt for block in pool.blocks if not block.is_null),
            "slots": self.books.slots.count - self.books.slots.num_free,
            "saved": list(self.books._requests),
            "pins": self.connector.has_pending_block_frees(),
            "requests": list(self.scheduler.requests),
            "deferred": len(self.scheduler.deferred_frees),
        }
        return {name: amount for name, amount in found.items() if amount}

    def _make_worker(self, config: Any) -> Any:
        worker = KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=self.scheduler.kv_cache_config
        )
        part = our_part(worker)._worker
        part.make_lane = lambda device: self.lane
        load = part.load

        def watched(jobs: Any) -> None:
            self.lane.loading = True
            load(jobs)
            self.lane.loading = False

        part.load = watched
        worker.register_kv_caches({setup.layer_name(0): torch.from_numpy(self.store.slots.view(np.int64))})
        return worker

    def _watch_restores(self) -> None:
        allocated = self.books.allocated

        def watched(request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                self.restored.append(self.books._requests[request.request_id].num_tokens)
            allocated(request, blocks, num_external_tokens)

        self.books.allocated = watched

    def _transferred(self, scheduled: Any) -> KVConnectorOutput:
        results = self.worker.get_transfer_results(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        return output

    def _finish(self, scheduled: Any, plan: Any, transferred: Any) -> None:
        self.runner.synchronise(plan)
        sampled = dict(zip(plan.sampling_ids, plan.sampled, strict=True))
        result = ModelRunnerOutput(
            req_ids=plan.request_ids,
            req_id_to_index={name: place for place, name in enumerate(plan.request_ids)},
            sampled_token_ids=[sampled.get(name, []) for name in plan.request_ids],
            pooler_output=[],
            kv_connector_output=transferred,
        )
        for client in self.scheduler.update_from_output(scheduled, result).values():
            for output in client.outputs:
                assert output.request_id not in self.ended, "output after the end"
                self.produced.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ended[output.request_id] = str(output.finish_reason)


def our_part(connector: Any) -> Any:
    parts = (connector, *getattr(connector, "sub_connectors", ()))
    return next(part for part in parts if hasattr(part, "update_state_before_preempt"))


def expected(prompt: list[int], count: int) -> list[int]:
    """The tokens that the model gives without any scheduler."""
    state, tokens = CHAIN.extend(CHAIN.start, 0, prompt), []
    for _ in range(count):
        tokens.append(CHAIN.next_token(state))
        state = CHAIN.extend(state, len(prompt) + len(tokens) - 1, tokens[-1:])
    return tokens
