"""A real vLLM scheduler without a model.

``FakeRunner`` stands in for the model runner: it answers every scheduled request with one fixed token once its prefill
is through. Schedules and KV bookkeeping are vLLM's own; no KV is written.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from schedloom.core.wire import LOCAL_ATTEMPT_KEY, PROTOCOL_VERSION

BLOCK = 16
TOKEN = 5

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 65536,
    "torch_dtype": "float32",
}


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def vllm_config(
    model: Path,
    *,
    asynchronous: bool = False,
    max_num_seqs: int = 16,
    role: str | None = "kv_consumer",
    prefix_caching: bool = True,
    additional: dict[str, Any] | None = None,
    token_budget: int = 2048,
    storage: Path | None = None,
) -> VllmConfig:
    transfer = None
    if role is not None:
        extra = {"shared_storage_path": str(storage or model / "kv")}
        transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role=role, kv_connector_extra_config=extra)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model),
            dtype="float32",
            max_model_len=8192,
            skip_tokenizer_init=True,
            enforce_eager=True,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=token_budget,
            max_model_len=8192,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching),
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
        additional_config=additional or {},
    )
    config.scheduler_config.async_scheduling = asynchronous
    return config


def make_scheduler(scheduler: Any, config: VllmConfig, num_blocks: int = 200) -> Any:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    config.cache_config.num_gpu_blocks = num_blocks
    return scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


def stock_class(asynchronous: bool) -> Any:
    return AsyncScheduler if asynchronous else Scheduler


def make_request(name: str, prompt: list[int], max_tokens: int = 4, marked: bool = False) -> Request:
    init_none_hash(sha256)
    extra = {LOCAL_ATTEMPT_KEY: PROTOCOL_VERSION} if marked else None
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(ignore_eos=True, max_tokens=max_tokens, temperature=0, extra_args=extra),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def tokens(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + index * 31 + index * index) % 500 for index in range(count)]


class FakeRunner:
    """Steps a scheduler as an engine core would: synchronously, or with two batches in flight."""

    def __init__(self, scheduler: Any, asynchronous: bool) -> None:
        self.scheduler = scheduler
        self.depth = 2 if asynchronous else 1
        self.in_flight: deque[Any] = deque()
        self.produced: dict[str, list[int]] = {}
        self.ended: dict[str, tuple[str, Any]] = {}

    def step(self) -> Any:
        scheduled = self.begin()
        if len(self.in_flight) >= self.depth:
            self.finish()
        return scheduled

    def begin(self) -> Any:
        """The first half of a step: another batch is in flight."""
        scheduled = self.scheduler.schedule()
        scheduled.sampling = set(filter(self._is_through, scheduled.num_scheduled_tokens))
        self.in_flight.append(scheduled)
        return scheduled

    def finish(self) -> None:
        """The second half: the output of the oldest batch in flight has come."""
        self._finish(self.in_flight.popleft())

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def drain(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not self.scheduler.has_requests():
                break
            self.step()
        while self.in_flight:
            self._finish(self.in_flight.popleft())
        if not self.scheduler.has_requests():
            return
        raise AssertionError(f"requests are left after {limit} steps: {list(self.scheduler.requests)}")

    def drain_finished(self) -> None:
        """Let the scheduler hear of ended requests, so that the next step is like the one before."""
        self.step()

    def _finish(self, scheduled: Any) -> None:
        outputs = self.scheduler.update_from_output(scheduled, self.run(scheduled))
        for client in outputs.values():
            for output in client.outputs:
                assert output.request_id not in self.ended, "output after the end"
                self.produced.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ended[output.request_id] = (str(output.finish_reason), output.stop_reason)

    def run(self, scheduled: Any) -> ModelRunnerOutput:
        names = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._sample(scheduled, name) for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _sample(self, scheduled: Any, name: str) -> list[int]:
        sampling = getattr(scheduled, "sampling", None)
        samples = self._is_through(name) if sampling is None else name in sampling
        return [TOKEN] if samples and name in self.scheduler.requests else []

    def _is_through(self, name: str) -> bool:
        """Whether the prefill of a request is through, when it was scheduled."""
        request = self.scheduler.requests.get(name)
        return request is not None and not request.is_prefill_chunk


def bookkeeping(scheduler: Any) -> dict[str, Any]:
    """What must be the same before a request came and after it was turned away."""
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.free_block_queue.get_all_free_blocks()
    return {
        "requests": sorted(scheduler.requests),
        "running": [request.request_id for request in scheduler.running],
        "waiting": len(scheduler.waiting),
        "deferred": len(scheduler.deferred_waiting),
        "eviction order": [block.block_id for block in free],
        "references": [block.ref_cnt for block in pool.blocks],
        "hits": vars(scheduler.kv_cache_manager.prefix_cache_stats),
    }
