"""C4, B11, X2: where a policy leaves requests out of a step, no more adapters come to run than vLLM has room for.

vLLM counts the adapters of a step, and ends the engine when a later step meets more than ``max_loras``.
"""

from typing import Any

import pytest
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest

from schedloom import Policy, hookimpl
from schedloom.core.views import RequestView
from tests.adapters.engine.conftest import Make
from tests.adapters.engine.harness import TOKEN, FakeRunner, make_request, tokens
from tests.adapters.engine.parts.test_metering import Fakes

ADAPTERS = 3
PER_ADAPTER = 3


class EveryOther(Policy):
    """Leaves each running prompt out of every second step that it could have."""

    name = "fake"

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._turn: dict[str, bool] = {}

    @hookimpl
    def limit_tokens(self, request: RequestView) -> int:
        turn = self._turn[request.request_id] = not self._turn.get(request.request_id, False)
        return 10 if turn else 0


def serve(runner: FakeRunner, max_loras: int) -> int:
    """Prompts with several adapters, one after the other: how many adapters came to run at once."""
    runner.scheduler.lora_config = LoRAConfig(max_loras=max_loras)
    for index in range(ADAPTERS * PER_ADAPTER):
        request = make_request(f"r{index}", tokens(index, 45), max_tokens=12)
        request.lora_request = LoRARequest(f"adapter {index % ADAPTERS}", index % ADAPTERS + 1, "nowhere")
        runner.scheduler.add_request(request)
    most = 0
    while runner.scheduler.has_requests():
        runner.step()
        most = max(most, len({request.lora_request.lora_int_id for request in runner.scheduler.running}))
    runner.drain()
    assert runner.produced == {f"r{index}": [TOKEN] * 12 for index in range(ADAPTERS * PER_ADAPTER)}
    return most


@pytest.mark.parametrize("max_loras", [1, 2])
def test_a_metered_prompt_keeps_the_place_of_its_adapter(make: Make, max_loras: int) -> None:
    assert serve(make("fake", registry=Fakes(EveryOther)), max_loras) == max_loras


@pytest.mark.parametrize("max_loras", [1, 2])
def test_streams_left_out_of_a_prefill_step_keep_the_places_of_their_adapters(make: Make, max_loras: int) -> None:
    assert serve(make("phase_separation"), max_loras) == max_loras


def test_requests_without_an_adapter_wait_for_none(make: Make) -> None:
    runner = make("phase_separation", "tpot_guard")
    runner.scheduler.lora_config = LoRAConfig(max_loras=1)
    first = make_request("adapted", tokens(1, 45), max_tokens=12)
    first.lora_request = LoRARequest("adapter", 1, "nowhere")
    runner.scheduler.add_request(first)
    runner.steps(3)
    runner.scheduler.add_request(make_request("plain", tokens(2, 45), max_tokens=12))
    runner.steps(3)
    assert {request.request_id for request in runner.scheduler.running} == {"adapted", "plain"}
    runner.drain()
