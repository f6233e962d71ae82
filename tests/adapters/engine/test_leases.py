"""X4: leases on vLLM's real block pool."""

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.adapters.engine.conftest import Make, choose
from tests.adapters.engine.harness import BLOCK, FakeRunner, make_request, tokens
from tests.adapters.engine.scenarios import cold_attempt, preempted_attempt, warm_attempt

TURN = tokens(1, 320)
LEASE = choose("kv_lease", ttl_seconds=60)


def add(runner: FakeRunner, name: str, prompt: list[int], session: str | None = None, **more: Any) -> None:
    request = make_request(name, prompt, **more)
    request.session_id = session
    runner.scheduler.add_request(request)


def record_refreshes(runner: FakeRunner) -> list[int]:
    sizes: list[int] = []
    pool = runner.scheduler.view.pool
    original = pool.refresh

    def recorded(blocks: Any) -> int:
        sizes.append(len(blocks))
        return int(original(blocks))

    pool.refresh = recorded
    return sizes


def resident(runner: FakeRunner) -> int:
    probe = make_request("probe", [*TURN, 1])
    return int(runner.scheduler.kv_cache_manager.get_computed_blocks(probe)[1])


def churn(runner: FakeRunner, turns: int, first: int = 100) -> None:
    """Other people's requests, which take every free block more than once."""
    for index in range(turns):
        add(runner, f"other {first + index}", tokens(first + index, 300), max_tokens=2)
        runner.drain()


def served(make: Make, *choices: Any, session: str | None = "s", **config: Any) -> FakeRunner:
    runner = make(*choices, **{"num_blocks": 100, "role": None, **config})
    clock = [0.0]
    runner.scheduler.view.clock = lambda: clock[0]
    runner.clock = clock  # type: ignore[attr-defined]
    add(runner, "turn", TURN, session)
    runner.drain()
    assert resident(runner) == len(TURN)
    return runner


def test_without_a_lease_the_turn_is_evicted(make: Make) -> None:
    for runner in (served(make, "append_prefill", role="kv_consumer"), served(make, LEASE, session=None)):
        churn(runner, 12)
        assert resident(runner) == 0


def test_with_a_lease_the_turn_stays(make: Make) -> None:
    runner = served(make, LEASE)
    refreshed = record_refreshes(runner)
    churn(runner, 30)
    assert resident(runner) == len(TURN)
    assert 0 < sum(refreshed) <= 2 * runner.scheduler.view.pool.num_taken


def test_a_lease_in_shadow_keeps_nothing(make: Make) -> None:
    runner = served(make, LEASE)
    for caller in runner.scheduler._callers:
        caller.set_modes({"kv_lease": "shadow"})
    churn(runner, 12)
    assert resident(runner) == 0


def test_after_its_time_the_turn_is_evicted(make: Make) -> None:
    runner = served(make, LEASE)
    churn(runner, 12)
    runner.clock[0] = 60.0  # type: ignore[attr-defined]
    churn(runner, 12, first=200)
    assert resident(runner) == 0


def test_a_lease_is_no_pin(make: Make) -> None:
    """Somebody who needs the whole pool gets it."""
    runner = served(make, LEASE)
    add(runner, "large", tokens(7, 97 * BLOCK), max_tokens=4)
    runner.drain()
    assert runner.ended["large"] == ("length", None)
    assert resident(runner) <= 2 * BLOCK, "the two blocks that the large request left"


def test_the_cache_can_be_reset_and_nothing_comes_back(make: Make) -> None:
    runner = served(make, LEASE)
    assert runner.scheduler.reset_prefix_cache()
    assert resident(runner) == 0
    churn(runner, 12)
    assert resident(runner) == 0


def test_the_pool_is_whole_after_refreshing(make: Make) -> None:
    runner = served(make, LEASE)
    churn(runner, 20)
    pool = runner.scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert len(free) == len(set(free)) == pool.get_num_free_blocks() == 99
    assert {block.ref_cnt for block in pool.blocks if not block.is_null} == {0}


def test_blocks_in_use_or_reused_are_left_alone(make: Make) -> None:
    runner = served(make, LEASE)
    pool, view = runner.scheduler.kv_cache_manager.block_pool, runner.scheduler.view
    add(runner, "next turn", [*TURN, *tokens(3, 40)], max_tokens=3)
    runner.step()
    blocks = view.pool.blocks_of(make_request("next turn", TURN))
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert view.pool.refresh(blocks) == len(blocks) > len(TURN) // BLOCK
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == order
    runner.drain()
    assert runner.scheduler.reset_prefix_cache()
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert view.pool.refresh(blocks) == 0
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == order


def test_the_beginning_of_a_prefix_outlives_its_end(make: Make) -> None:
    runner = served(make, LEASE)
    view = runner.scheduler.view
    pool = runner.scheduler.kv_cache_manager.block_pool
    hit = runner.scheduler.kv_cache_manager.get_computed_blocks(make_request("probe", [*TURN, 1]))[0].blocks[0]
    add(runner, "next turn", [*TURN, *tokens(3, 40)], max_tokens=3)
    runner.step()
    blocks = view.pool.blocks_of(make_request("next turn", TURN))
    runner.drain()
    view.pool.refresh(blocks)
    last = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()][-len(hit) :]
    assert last == [block.block_id for block in reversed(hit)]


def test_an_idle_pool_is_never_refreshed(make: Make) -> None:
    runner = served(make, LEASE, num_blocks=4000)
    refreshed = record_refreshes(runner)
    churn(runner, 20)
    assert refreshed == []


@pytest.mark.parametrize("reverse", [False, True])
def test_together_with_append_prefill(make: Make, reverse: bool) -> None:
    names = ["append_prefill", "kv_lease", "phase_separation", "short_request_first"][:: -1 if reverse else 1]
    assert cold_attempt(make(*names)) == []
    assert warm_attempt(make(*names)) == []
    assert preempted_attempt(make(*names, num_blocks=50)) == []


def test_preempted_and_aborted_sessions_leave_no_hole(make: Make) -> None:
    runner = make(LEASE, num_blocks=40, role=None)
    for index in range(8):
        add(runner, f"r{index}", tokens(index, 150), session=f"s{index % 3}", max_tokens=80)
    for index in range(200):
        runner.step()
        if index % 40 == 39:
            runner.scheduler.finish_requests(f"r{index // 40}", RequestStatus.FINISHED_ABORTED)
    runner.drain(3000)
    assert runner.scheduler.kv_cache_manager.usage == 0
    assert runner.scheduler.reset_prefix_cache()
