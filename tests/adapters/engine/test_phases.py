"""B11: prefill and decode never share a batch, on vLLM's real schedulers."""

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from schedloom.adapters.engine.scheduler import composed
from schedloom.core.composition import compose
from tests.adapters.engine.conftest import Make, choose
from tests.adapters.engine.harness import (
    TOKEN,
    FakeRunner,
    make_request,
    make_scheduler,
    stock_class,
    tokens,
    vllm_config,
)
from tests.adapters.engine.scenarios import cold_attempt, preempted_attempt, warm_attempt
from tests.adapters.engine.test_admission import record_calls

BUCKETS = choose("phase_separation", prefill_token_buckets=[64, 128, 256], decode_batch_buckets=[2, 4])


class Batches:
    """What every batch of a scheduler held, as vLLM itself tells the runner."""

    def __init__(self, scheduler: Any) -> None:
        self.prefill: list[int] = []
        self.decode: list[int] = []
        self.mixed = 0
        self.trimmed = 0
        self._scheduler, self._schedule = scheduler, scheduler.schedule
        scheduler.schedule = self._recorded

    def _recorded(self) -> Any:
        output = self._schedule()
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        counts = output.num_scheduled_tokens
        requests = self._scheduler.requests
        prefill = {name for name in counts if requests[name].num_tokens - computed[name] > 1}
        decode = set(counts) - prefill
        self.mixed += bool(prefill and decode)
        self.prefill += [sum(counts[name] for name in prefill)] if prefill else []
        self.decode += [len(decode)] if decode else []
        drafts = output.scheduled_spec_decode_tokens
        self.trimmed += sum(counts[name] != 1 + len(drafts.get(name, ())) for name in decode)
        return output


def serve(runner: FakeRunner, count: int, max_tokens: int = 30) -> Batches:
    """Prompts of many lengths that arrive one after the other while others decode."""
    batches = Batches(runner.scheduler)
    for index in range(count):
        runner.scheduler.add_request(make_request(f"r{index}", tokens(index, 20 + 97 * index % 400), max_tokens))
        runner.steps(2)
    runner.drain(3000)
    return batches


def test_vllm_itself_mixes_so_the_test_would_see_it(make: Make) -> None:
    assert serve(make("append_prefill"), 8).mixed > 3


@pytest.mark.parametrize("choice", ["phase_separation", BUCKETS], ids=["plain", "buckets"])
@pytest.mark.parametrize("num_blocks", [400, 70], ids=["roomy", "tight"])
def test_no_batch_mixes_and_everybody_is_served(make: Make, choice: Any, num_blocks: int) -> None:
    runner = make(choice, num_blocks=num_blocks)
    batches = serve(runner, 12)
    assert batches.mixed == 0
    assert batches.trimmed == 0
    assert batches.prefill
    assert batches.decode
    assert {name: produced for name, produced in runner.produced.items() if produced != [TOKEN] * 30} == {}


def test_batches_fit_their_buckets(make: Make) -> None:
    batches = serve(make(BUCKETS, num_blocks=400), 12)
    assert max(batches.prefill) <= 256
    assert max(batches.decode) <= 4


def test_more_streams_than_the_largest_bucket_take_turns(make: Make) -> None:
    runner = make(choose("phase_separation", decode_batch_buckets=[4]), num_blocks=400)
    for index in range(10):
        runner.scheduler.add_request(make_request(f"r{index}", tokens(index, 20), 200))
    runner.steps(60)
    rates = [len(runner.produced[f"r{index}"]) for index in range(10)]
    assert max(rates) - min(rates) <= 2, rates


def test_streams_go_on_while_prompts_keep_coming(make: Make) -> None:
    runner = make("phase_separation", num_blocks=2000, max_num_seqs=64, token_budget=64)
    runner.scheduler.add_request(make_request("stream", tokens(1, 20), 500))
    runner.steps(2)
    before = len(runner.produced.get("stream", []))
    for index in range(40):
        runner.scheduler.add_request(make_request(f"r{index}", tokens(index + 2, 400), 2))
        runner.step()
    assert len(runner.produced["stream"]) - before >= 18, "a decode step for every prefill step"
    runner.drain(3000)
    assert len(runner.ended) == 41


class Loads:
    """Stands in for a connector that loads whole prompts while the engine goes on."""

    def __init__(self, scheduler: Any, prefix: str) -> None:
        self.scheduler, self.prefix = scheduler, prefix
        self.loading: list[str] = []
        connector = scheduler.connector
        connector.get_num_new_matched_tokens = self.matched
        connector.update_state_after_alloc = self.allocated
        connector.build_connector_meta = lambda output: None
        connector.request_finished = lambda request, blocks: (False, None)

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        if not request.request_id.startswith(self.prefix) or request.num_computed_tokens:
            return 0, False
        return request.num_tokens - computed, True

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        if external:
            self.loading.append(request.request_id)

    def arrive(self, most: int | None = None) -> None:
        self.scheduler.finished_recving_kv_req_ids.update(self.loading[:most])
        self.loading = self.loading[most:] if most else []


def test_a_request_whose_kv_was_loaded_joins_the_decodes(make: Make) -> None:
    runner = make("phase_separation", num_blocks=400)
    loads = Loads(runner.scheduler, "loaded")
    batches = Batches(runner.scheduler)
    for index in range(5):
        runner.scheduler.add_request(make_request(f"prompt {index}", tokens(index, 100), 40))
        runner.scheduler.add_request(make_request(f"loaded {index}", tokens(index + 10, 100), 40))
        runner.steps(3)
        loads.arrive()
    while runner.scheduler.has_requests():
        loads.arrive()
        runner.step()
    runner.drain()
    assert batches.mixed == 0
    assert len(runner.ended) == 10
    assert sum(batches.prefill) == 5 * 100, "a loaded request was prefilled"


def test_loaded_requests_do_not_keep_prefill_away(make: Make) -> None:
    """They stand before all others in vLLM's loop, which stops at the first that gets no tokens."""
    runner = make("phase_separation", num_blocks=2000, max_num_seqs=64)
    loads = Loads(runner.scheduler, "loaded")
    runner.scheduler.add_request(make_request("stream", tokens(1, 20), 400))
    for index in range(30):
        runner.scheduler.add_request(make_request(f"loaded {index}", tokens(index + 10, 50), 40))
    runner.steps(3)
    runner.scheduler.add_request(make_request("prompt", tokens(2, 100), 1))
    for _ in range(6):
        loads.arrive(1)
        runner.step()
    assert "prompt" in runner.ended


def test_what_comes_first_decides_where_nothing_runs(make: Make) -> None:
    runner = make("phase_separation")
    batches, loads = Batches(runner.scheduler), Loads(runner.scheduler, "loaded")
    runner.scheduler.add_request(make_request("loaded", tokens(1, 50), 10))
    runner.step()
    loads.arrive()
    runner.scheduler.add_request(make_request("prompt", tokens(2, 50), 10))
    runner.drain()
    assert batches.mixed == 0
    assert batches.decode[0] == 1
    assert batches.prefill == [50]


def test_the_head_that_waits_for_prefill_is_not_looked_up_in_every_step(make: Make) -> None:
    runner = make(choose("phase_separation", decode_steps=50), num_blocks=400)
    runner.scheduler.add_request(make_request("stream", tokens(1, 20), 100))
    runner.steps(3)
    looked_up = record_calls(runner.scheduler, "look_up_local_prefix")
    runner.scheduler.add_request(make_request("prompt", tokens(2, 100), 2))
    runner.scheduler.add_request(make_request("behind", tokens(3, 100), 2))
    runner.steps(20)
    assert looked_up == ["prompt"]


@pytest.mark.parametrize("reverse", [False, True])
def test_together_with_others(make: Make, reverse: bool) -> None:
    names = ["append_prefill", "phase_separation", "short_request_first", "tpot_guard"][:: -1 if reverse else 1]
    assert cold_attempt(make(*names)) == []
    assert warm_attempt(make(*names)) == []
    assert preempted_attempt(make(*names, num_blocks=50)) == []
    runner = make(*names, num_blocks=70)
    assert serve(runner, 12).mixed == 0
    assert len(runner.ended) == 12


def test_aborts_and_a_reset_in_every_phase(make: Make) -> None:
    runner = make(BUCKETS, num_blocks=100, role=None)
    batches = Batches(runner.scheduler)
    for index in range(24):
        runner.scheduler.add_request(make_request(f"r{index}", tokens(index, 20 + 31 * index % 200), 12))
        runner.step()
        if index % 3 == 2:
            runner.scheduler.finish_requests(f"r{index - 1}", RequestStatus.FINISHED_ABORTED)
        if index % 8 == 7:
            assert runner.scheduler.reset_prefix_cache(reset_running_requests=True)
    runner.drain(2000)
    assert batches.mixed == 0
    assert len(runner.ended) == 16
    assert runner.scheduler.kv_cache_manager.usage == 0


def test_switched_off_vllm_mixes_again(make: Make) -> None:
    runner = make("phase_separation", num_blocks=400)
    for caller in runner.scheduler._callers:
        caller.set_modes({"phase_separation": "off"})
    assert serve(runner, 8).mixed > 3


def test_a_row_with_drafts_is_taken_whole_or_left_out(model: Path) -> None:
    policies = compose([BUCKETS])
    scheduler = make_scheduler(composed(stock_class(False), policies), vllm_config(model), num_blocks=400)
    scheduler.num_spec_tokens = 3
    runner = FakeRunner(scheduler, asynchronous=False)
    batches = Batches(scheduler)
    for index in range(6):
        scheduler.add_request(make_request(f"r{index}", tokens(index, 20 + 60 * index), 30))
    drafted = 0
    for _ in range(300):
        for request in scheduler.running:
            request.spec_token_ids = [] if request.is_prefill_chunk else [TOKEN + 1] * 3
        drafted += len(runner.step().scheduled_spec_decode_tokens)
        if not scheduler.has_requests():
            break
    runner.drain()
    assert drafted > 50
    assert (batches.mixed, batches.trimmed) == (0, 0)
    assert all(produced == [TOKEN] * 30 for produced in runner.produced.values())
    assert max(batches.decode) == 4
