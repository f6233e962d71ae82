"""The model's arithmetic: plain integers and arrays agree, and no single wrong record ever cancels out."""

import random

import pytest

pytest.importorskip("numpy", reason="comes with an engine: install schedloom[cpu]")

import numpy

from schedloom.adapters.engine.laboratory.store import Arithmetic
from schedloom.conformance.chain import MASK, Chain

LIMIT = 200
CHAIN = Chain()
ARRAYS = Arithmetic(CHAIN, LIMIT)


def some_tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, CHAIN.vocabulary) for _ in range(count)]


def test_a_run_on_arrays_ends_in_the_reference_state() -> None:
    tokens = some_tokens(1, LIMIT)
    start = numpy.array([CHAIN.start], numpy.uint64)
    _, middle = ARRAYS.run(start, 0, numpy.array(tokens[:77], numpy.uint64))
    _, end = ARRAYS.run(middle[-1:], 77, numpy.array(tokens[77:], numpy.uint64))
    expected = CHAIN.extend(CHAIN.start, 0, tokens)
    assert int(end[-1]) == expected
    assert int(ARRAYS.next_tokens(end)[-1]) == CHAIN.next_token(expected)


def test_reading_back_what_was_written_gives_the_reference_state() -> None:
    tokens = some_tokens(2, 50)
    records, _ = ARRAYS.run(numpy.array([CHAIN.start], numpy.uint64), 0, numpy.array(tokens, numpy.uint64))
    reads = ARRAYS.fold(numpy.stack([records, records]), numpy.array([50, 31]))
    assert [int(read) for read in reads] == [CHAIN.extend(CHAIN.start, 0, tokens[:count]) for count in (50, 31)]


@pytest.mark.parametrize("wrong", [0, 1, 17, 49])
@pytest.mark.parametrize("difference", [1, 1 << 63, MASK])
def test_a_wrong_record_changes_the_state_for_good(wrong: int, difference: int) -> None:
    tokens = some_tokens(3, 50)
    records, _ = ARRAYS.run(numpy.array([CHAIN.start], numpy.uint64), 0, numpy.array(tokens, numpy.uint64))
    records[wrong] ^= numpy.uint64(difference)
    state = int(ARRAYS.fold(records[None, :], numpy.array([50]))[0])
    right = CHAIN.extend(CHAIN.start, 0, tokens)
    for position in range(50, LIMIT):
        assert state != right
        state, right = (CHAIN.extend(each, position, (5,)) for each in (state, right))


def test_two_swapped_records_change_the_state() -> None:
    tokens = some_tokens(4, 50)
    records, _ = ARRAYS.run(numpy.array([CHAIN.start], numpy.uint64), 0, numpy.array(tokens, numpy.uint64))
    records[[3, 20]] = records[[20, 3]]
    assert int(ARRAYS.fold(records[None, :], numpy.array([50]))[0]) != CHAIN.extend(CHAIN.start, 0, tokens)
