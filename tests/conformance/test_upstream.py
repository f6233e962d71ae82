"""C5: what the suite has found in vLLM itself, as the shortest schedules known. Each is expected to fail: one that
passes tells that the laboratory need not go around the fault any more.
"""

from typing import Any

import pytest

from schedloom.conformance.cells import Cell
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.mutants.blocks import CachesWhatIsNeverComputed
from schedloom.conformance.mutants.catalogue import ADAPTERS
from schedloom.conformance.mutants.requests import AdmitsAnyAdapter
from schedloom.conformance.oracles import Oracles
from schedloom.conformance.script import Act, Arrive, Relax, Settle, Squeeze, Step
from schedloom.conformance.trial import replay, try_cell

DECODER: dict[str, Any] = {"variant": "sliding", "role": "consumer"}

WHOLE_LOAD = """vLLM 0.32: all KV of a prompt is received, for a model whose layers have a sliding window. Blocks are
given for the window of the token behind the prompt; then `_update_waiting_for_remote_kv` has the last prompt token
computed again, whose window begins one token earlier. Where that token ends a block there is none, and the null block
is read.
"""

FAILED_BLOCKS = """vLLM 0.32: some blocks of a load are reported invalid, for a model whose layers have a sliding
window, and kv_load_failure_policy is recompute. `_update_requests_with_invalid_blocks` goes back to the first invalid
block, where the window needs blocks that the request was never given, and the null block is read. A connector that
reports the request in failed_recving is exact.
"""

UNCOMPUTED = """vLLM 0.32: prefix caching and priority scheduling; no connector and no asynchronous steps are needed.
`allocate_slots` puts a block into the prefix cache in the step that is to fill it. A running request further back that
finds no free block then preempts the one of lowest priority, which this very step may have given tokens: `schedule()`
takes them back, `_preempt_request` frees its blocks, and `cached_block_hash_to_block` still names them although nobody
will compute them. The next request with that prefix hits them and gets wrong tokens. The tail block freed first is
taken and forgotten at once, so more than one must be new: those of two KV cache groups, as here, or those of a chunk of
prefill in front of a decode (`long_prefill_token_threshold`), where the preempted request itself goes wrong. vLLM's
pull request 43569 rolls such registrations back.
"""

TOO_MANY_ADAPTERS = """vLLM 0.32: adapters, and steps that leave a running request out (asynchronous scheduling with its
last tokens in flight, or blocks that are waited for). `schedule()` collects the adapters of the requests that this step
runs, and admits waiting requests up to `max_loras` by those alone. A running request that was left out, and is in a
later step once more, then meets them: `assert len(scheduled_loras) <= self.lora_config.max_loras` ends the engine.
"""

HYBRID = Cell(variant="hybrid", priority=True)
PREEMPTED_IN_ITS_OWN_STEP: list[Act] = [
    Arrive(1, fresh=22, max_tokens=6, priority=1),
    Step(),
    Arrive(2, fresh=12, max_tokens=6),
    Step(),
    Squeeze(HYBRID.num_blocks),
    Step(),
    Relax(),
    Step(20),
    Arrive(3, fresh=2, max_tokens=2, parent=1, keep=28),
    Step(2),
]
"""In the third step the last token of both of its last blocks is scheduled for r1, and then r2 needs a block."""


@pytest.mark.xfail(reason=WHOLE_LOAD, strict=True)
def test_the_last_token_of_a_received_prompt_sees_its_whole_window(laboratory: Laboratory) -> None:
    acts: list[Act] = [Arrive(1, fresh=60, max_tokens=2, transfer="receive"), Step(), Settle(1), Step(3)]
    assert not replay(laboratory, Cell(**DECODER, whole_loads=True), acts).violations


@pytest.mark.xfail(reason=FAILED_BLOCKS, strict=True)
def test_a_load_of_which_blocks_failed_is_computed_again_from_where_its_window_is_there(laboratory: Laboratory) -> None:
    settle = Settle(1, failed=True)
    acts: list[Act] = [Arrive(1, fresh=54, max_tokens=2, transfer="receive"), Step(), settle, Step(3)]
    assert not replay(laboratory, Cell(**DECODER, failed_blocks=True), acts).violations


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("length", range(52, 62))
def test_the_laboratory_goes_around_them(laboratory: Laboratory, length: int, failed: bool) -> None:
    acts: list[Act] = [Arrive(1, length, 2, transfer="receive"), Step(), Settle(1, failed), Step(3)]
    assert not replay(laboratory, Cell(**DECODER), acts).violations


@pytest.mark.xfail(reason=UNCOMPUTED, strict=True)
def test_a_request_preempted_in_its_own_step_leaves_no_trap(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Oracles, "_preempted", lambda *_: None)
    assert not replay(laboratory, HYBRID, PREEMPTED_IN_ITS_OWN_STEP, (CachesWhatIsNeverComputed,)).violations


def test_such_a_trap_is_seen_before_anybody_falls_into_it(laboratory: Laboratory) -> None:
    found = replay(laboratory, HYBRID, PREEMPTED_IN_ITS_OWN_STEP, (CachesWhatIsNeverComputed,))
    assert [(violation.invariant, violation.step) for violation in found.violations] == [("KV-3", 3)]


def test_our_schedulers_set_no_such_trap(laboratory: Laboratory) -> None:
    found = replay(laboratory, HYBRID, PREEMPTED_IN_ITS_OWN_STEP)
    assert not found.violations and found.events["preempted"] == 1


@pytest.mark.xfail(reason=TOO_MANY_ADAPTERS, strict=True)
def test_no_more_adapters_meet_than_a_batch_may_hold(laboratory: Laboratory) -> None:
    assert not try_cell(laboratory, ADAPTERS, 13, faults=(AdmitsAnyAdapter,)).violations


def test_our_schedulers_count_the_adapters_of_all_that_runs(laboratory: Laboratory) -> None:
    assert not try_cell(laboratory, ADAPTERS, 13).violations
