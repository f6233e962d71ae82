"""A6, X4: the closed list of what can be continued from its tokens alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.metrics.stats import PrefillStats

from schedloom.adapters.engine import continuable
from schedloom.adapters.engine.continuable import HARMLESS, continue_after, engine_obstacle, obstacle
from schedloom.adapters.engine.parts.returning import tell_first
from tests.adapters.engine.handing import request

HARMFUL: dict[str, Any] = {
    "n": 2,
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "repetition_penalty": 1.1,
    "seed": 0,
    "stop": ["end"],
    "min_tokens": 3,
    "logprobs": 0,
    "prompt_logprobs": 1,
    "prompt_logprob_token_ids": np.zeros((1, 2), np.int64),
    "prompt_logprob_start": 0,
    "logprob_token_ids": [3],
    "flat_logprobs": True,
    "output_text_buffer_length": 2,
    "structured_outputs": StructuredOutputsParams(json="{}"),
    "logit_bias": {3: 1.0},
    "allowed_token_ids": [3],
    "bad_words": ["x"],
    "_bad_words_token_ids": [[3]],
    "skip_reading_prefix_cache": True,
    "thinking_token_budget": 100,
    "repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_count=2),
    "routed_experts_prompt_start": 1,
    "trace_decode_token_ids": [3],
}

HARMLESS_VALUES: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "stop_token_ids": [3],
    "ignore_eos": False,
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "stream_interval": 4,
}


def with_parameter(name: str, value: Any) -> Any:
    made = request("cmpl-1", [1, 2, 3], 4)
    setattr(made.sampling_params, name, value)
    return made


def test_a_plain_request_can_be_continued() -> None:
    assert obstacle(request("cmpl-1", [1, 2, 3], 4)) is None
    assert obstacle(request("cmpl-1", [1, 2, 3], 4, **HARMLESS_VALUES)) is None


def test_what_the_front_end_fills_in_is_harmless() -> None:
    """It resolves whether there is a watermark, in every request, from vLLM 0.32 on."""
    assert obstacle(with_parameter("watermarking", False)) is None
    assert obstacle(with_parameter("watermarking", True)) is None


def test_every_parameter_of_this_vllm_is_known() -> None:
    assert set(SamplingParams.__struct_fields__) - HARMLESS - HARMFUL.keys() == set()


@pytest.mark.parametrize("name", sorted(HARMFUL.keys() & set(SamplingParams.__struct_fields__)))
def test_a_parameter_that_needs_more_than_tokens_stands_against_it(name: str) -> None:
    assert obstacle(with_parameter(name, HARMFUL[name])) == name


def test_a_parameter_that_nobody_has_thought_of_stands_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(SamplingParams):
        tomorrows_sampler: float | None = None

    parameters = tuple(name for name in Newer.__struct_fields__ if name not in HARMLESS)
    monkeypatch.setattr(continuable, "_OTHER_PARAMETERS", parameters)
    monkeypatch.setattr(continuable, "_DEFAULTS", Newer())
    made = request("cmpl-1", [1, 2, 3], 4)
    made.sampling_params = Newer(max_tokens=4)
    assert obstacle(made) is None
    made.sampling_params.tomorrows_sampler = 0.5
    assert obstacle(made) == "tomorrows_sampler"


@pytest.mark.parametrize(
    ("attribute", "value", "code"),
    [
        ("mm_features", [object()], "mm_features"),
        ("prompt_embeds", np.zeros((3, 4)), "prompt_embeds"),
        ("prompt_is_token_ids", [True, False], "prompt_is_token_ids"),
        ("pooling_params", PoolingParams(), "pooling_params"),
        ("structured_output_request", object(), "structured_output_request"),
        ("ec_transfer_params", {}, "ec_transfer_params"),
        ("resumable", True, "streaming_input"),
        ("request_id", "1_cmpl-1", "n"),
        ("prompt_token_ids", None, "no_tokens"),
    ],
)
def test_a_request_that_is_more_than_tokens_stands_against_it(attribute: str, value: Any, code: str) -> None:
    made = request("cmpl-1", [1, 2, 3], 4)
    setattr(made, attribute, value)
    assert obstacle(made) == code


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}, "job_class": "batch", "session_id": "s"}, None),
        ({"thinking": 3}, "extra_args"),
    ],
)
def test_extra_arguments_may_steer_a_logits_processor(extra: dict[str, Any], code: str | None) -> None:
    assert obstacle(request("cmpl-1", [1, 2, 3], 4, extra=extra)) == code


class FakeScheduler:
    """As much of vLLM's scheduler as tells how tokens are made."""

    def __init__(self) -> None:
        self.vllm_config: Any = SimpleNamespace(
            model_config=SimpleNamespace(logits_processors=None), watermark_config=None
        )
        self.aux_output_connector: object = None
        self.return_sampling_mask = False


def watermarks(scheduler: FakeScheduler) -> None:
    scheduler.vllm_config.watermark_config = object()


def processes_logits(scheduler: FakeScheduler) -> None:
    scheduler.vllm_config.model_config.logits_processors = ["some.Processor"]


def tells_more(scheduler: FakeScheduler) -> None:
    scheduler.aux_output_connector = object()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda _: None, None),
        (watermarks, "watermarking"),
        (processes_logits, "logits_processors"),
        (tells_more, "more_than_tokens"),
    ],
)
def test_an_engine_that_makes_tokens_of_more_than_tokens_stands_against_it(change: Any, code: str | None) -> None:
    scheduler = FakeScheduler()
    change(scheduler)
    assert engine_obstacle(scheduler) == code


def test_output_so_far_becomes_prompt_for_scheduler_and_workers() -> None:
    prompt, output = list(range(30)), [7, 8, 9]
    made = request("cmpl-1", prompt, 10)
    clients = made.sampling_params
    continue_after(made, output)
    assert made.prompt_token_ids == list(made.all_token_ids) == [*prompt, *output]
    assert (made.num_prompt_tokens, made.num_output_tokens, len(made.block_hashes)) == (33, 0, 2)
    assert made.max_tokens == made.sampling_params.max_tokens == 7
    assert (clients.max_tokens, len(prompt)) == (10, 30), "the front end has these too"


class FakeOutput:
    def __init__(self, stats: Any) -> None:
        self.new_token_ids = [9]
        self.prefill_stats = stats


def test_a_client_is_told_of_its_own_prompt_only() -> None:
    stats = PrefillStats()
    stats.set(num_prompt_tokens=30, num_local_cached_tokens=4, num_external_cached_tokens=25)
    stats.num_cache_creation_tokens = 1
    output = FakeOutput(stats)
    tell_first(output, [7, 8, 7, 8, 7, 8, 7, 8, 7, 8])
    assert output.new_token_ids == [7, 8, 7, 8, 7, 8, 7, 8, 7, 8, 9]
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_computed_tokens) == (20, 20, 0)
    assert (stats.num_local_cached_tokens, stats.num_external_cached_tokens) == (4, 16)
    assert stats.num_cache_creation_tokens == 0
