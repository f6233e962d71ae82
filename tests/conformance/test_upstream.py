"""C5: what the suite has found in vLLM itself, as the shortest schedules known. Each is expected to fail: one that
passes tells that the laboratory need not go around the fault any more.
"""

from typing import Any

import pytest

from schedloom.conformance.cells import Cell
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.script import Act, Arrive, Settle, Step
from schedloom.conformance.trial import replay

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
