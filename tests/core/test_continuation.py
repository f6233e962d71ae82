"""A5: a request that an engine hands back travels as exact token ids, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedloom.core.continuation import (
    CONTINUABLE_KEY,
    HANDED_BACK_PREFIX,
    BadTicket,
    HandBack,
    Ticket,
    digest,
    is_continuable,
)

_TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=200).map(tuple)


@given(_TOKENS, _TOKENS)
def test_a_hand_back_is_read_as_it_was_written(prompt: tuple[int, ...], output: tuple[int, ...]) -> None:
    handed_back = HandBack("pool_exhausted", prompt, output)
    assert HandBack.read(handed_back.stop_reason) == handed_back
    assert Ticket.read(handed_back.ticket.written()) == Ticket(digest(prompt), output)


@pytest.mark.parametrize("stop_reason", [None, 7, "", "stop", "schedloom:rejected:no_usable_prefix"])
def test_other_stop_reasons_are_no_hand_backs(stop_reason: object) -> None:
    assert HandBack.read(stop_reason) is None


@pytest.mark.parametrize("rest", ["", "x", "x:", "x:AA", "x:AA.AA", "x:é.é"])
def test_a_damaged_hand_back_is_refused(rest: str) -> None:
    with pytest.raises(BadTicket):
        HandBack.read(HANDED_BACK_PREFIX + rest)


def test_token_ids_that_were_cut_short_are_refused() -> None:
    whole = HandBack("x", range(1000), range(5)).ticket.written()
    with pytest.raises(BadTicket):
        Ticket.read(whole[:-12])
    with pytest.raises(BadTicket):
        Ticket.read(None)


def test_prompts_are_told_apart() -> None:
    assert digest([1, 2]) == digest((1, 2)) != digest([2, 1])


def test_only_the_mark_of_this_protocol_counts() -> None:
    assert is_continuable({CONTINUABLE_KEY: 1})
    assert not any(map(is_continuable, (None, {}, {CONTINUABLE_KEY: 2}, {CONTINUABLE_KEY: "1"})))
