"""R11: a session's engines are those that every router names, and few sessions move when an engine leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedloom.core.composition import PolicyChoice, compose
from schedloom.core.routing import Attempt, Leg, Route, RouteRequest, SessionOwner
from schedloom.policies.rendezvous import Rendezvous
from schedloom.policies.rendezvous.policy import RendezvousSettings
from tests.policies.routing import CONTRACT, FakeCandidate, asked
from tests.policies.test_session_owner import Fleet, Worker

SESSIONS = [asked(session=f"session-{number}") for number in range(2000)]
FOLLOW_UP = asked(session="s", follows_up=True)


def engines(count: int = 8, ranks: int = 1, host: str = "10.0.0") -> list[FakeCandidate]:
    return [
        FakeCandidate(f"decoder-{number}", rank, origin=f"http://{host}.{number}:8000")
        for number in range(count)
        for rank in range(ranks)
    ]


def place(request: RouteRequest, candidates: Sequence[FakeCandidate], leg: Leg = Leg.DECODE) -> FakeCandidate:
    scores = Rendezvous().score_workers(request, leg, candidates)
    assert scores is not None and sorted(scores) == [0.0] * (len(candidates) - 1) + [1.0]
    return candidates[scores.index(1.0)]


def places(candidates: Sequence[FakeCandidate]) -> list[tuple[str, int]]:
    chosen = [place(session, candidates) for session in SESSIONS]
    return [(one.origin, one.rank) for one in chosen]


@settings(max_examples=20)
@given(host=st.from_regex(r"[a-z0-9-]{1,20}", fullmatch=True), gone=st.integers(0, 7))
def test_only_the_sessions_of_an_engine_that_leaves_move(host: str, gone: int) -> None:
    fleet = engines(host=host)
    before = places(fleet)
    left = fleet[gone].origin
    after = places([one for one in fleet if one.origin != left])
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert {origin for origin, _ in moved} == {left}
    assert 0.085 < len(moved) / len(SESSIONS) < 0.165
    shares = Counter(new for old, new in zip(before, after, strict=True) if old != new)
    assert len(shares) == 7 and max(shares.values()) < 0.3 * len(moved)


@given(order=st.permutations(range(8)), epoch=st.text(max_size=8))
def test_neither_order_nor_names_nor_restarts_move_a_session(order: list[int], epoch: str) -> None:
    fleet = engines()
    contract = CONTRACT.model_copy(update={"epoch": epoch})
    again = [replace(fleet[old], name=f"decoder-{new}", contract=contract) for new, old in enumerate(order)]
    for session in SESSIONS[:100]:
        assert place(session, again).origin == place(session, fleet).origin


def test_every_rank_has_its_share() -> None:
    shares = Counter(places(engines(4, ranks=2)))
    assert len(shares) == 8
    assert max(abs(share - 250) for share in shares.values()) < 80


def test_models_have_places_of_their_own() -> None:
    fleet = engines()
    elsewhere = [place(asked(session=one.session, model="other"), fleet) for one in SESSIONS]
    same = sum(one.origin == origin for one, (origin, _) in zip(elsewhere, places(fleet), strict=True))
    assert 0.085 < same / len(SESSIONS) < 0.165


def test_any_session_has_a_place() -> None:
    for session in ("", "\ud800", "\0", "ü" * 256):
        place(asked(session=session), engines())


@pytest.mark.parametrize(("leg", "lead"), [(Leg.PREFILL, 2), (Leg.DECODE, 3)])
def test_a_place_that_is_too_busy_is_left_for_the_next(leg: Leg, lead: int) -> None:
    policy = Rendezvous(RendezvousSettings(max_prefill_lead=2, max_lead=3))
    fleet = engines()
    home = place(SESSIONS[0], fleet, leg)
    second = place(SESSIONS[0], [one for one in fleet if one is not home], leg)
    for busy, chosen in ((lead, home), (lead + 1, second)):
        home.in_flight = busy
        scores = policy.score_workers(SESSIONS[0], leg, fleet)
        assert scores is not None and fleet[scores.index(1.0)] is chosen


@given(seed=st.integers(0, 2**32), lead=st.integers(0, 5))
def test_no_engine_is_ever_further_ahead_than_the_bound(seed: int, lead: int) -> None:
    """A thousand requests of few sessions at once, some of which end."""
    policy, fleet, chance = Rendezvous(RendezvousSettings(max_lead=lead)), engines(4), Random(seed)
    under_way: list[FakeCandidate] = []
    for _ in range(300):
        scores = policy.score_workers(asked(session=str(chance.randrange(3))), Leg.DECODE, fleet)
        assert scores is not None
        chosen = fleet[scores.index(1.0)]
        assert chosen.in_flight <= min(one.in_flight for one in fleet) + lead
        chosen.in_flight += 1
        under_way.append(chosen)
        if chance.random() < 0.2:
            under_way.pop(chance.randrange(len(under_way))).in_flight -= 1


def test_without_a_session_others_choose() -> None:
    assert Rendezvous().score_workers(asked(), Leg.DECODE, engines()) is None
    together = compose([PolicyChoice(name="rendezvous"), PolicyChoice(name="power_of_two")], side="router")
    assert together.names == ["power_of_two", "rendezvous"]


def decoders(ranks: int = 2) -> Fleet:
    fleet = engines(8, ranks)
    return Fleet(
        decoders=[Worker(one.name, CONTRACT, targets=fleet[n : n + ranks]) for n, one in enumerate(fleet)][::ranks]
    )


def planned(request: RouteRequest, fleet: Fleet, **settings: object) -> list[Attempt] | None:
    return Rendezvous(RendezvousSettings.model_validate(settings)).plan_route(request, None, fleet)


def test_a_follow_up_without_an_owner_is_tried_where_its_first_turn_went() -> None:
    fleet = decoders()
    first = place(asked(session="s"), engines(8, 2))
    assert planned(FOLLOW_UP, fleet) == [Attempt(Route.APPEND, worker=first.name, rank=first.rank)]


NOT_TRIED: dict[str, RouteRequest] = {
    "a first turn": asked(session="s"),
    "without a session": asked(follows_up=True),
    "what one transfer cannot serve": asked(session="s", follows_up=True, splittable=False),
}


@pytest.mark.parametrize("request_", NOT_TRIED.values(), ids=NOT_TRIED)
def test_what_is_not_tried(request_: RouteRequest) -> None:
    assert planned(request_, decoders()) is None


def test_a_known_owner_is_for_its_own_policy() -> None:
    owner = SessionOwner("decoder-0", CONTRACT.epoch, 0)
    assert Rendezvous().plan_route(FOLLOW_UP, owner, decoders()) is None


def test_no_attempt_where_it_is_switched_off_or_nobody_is_turned_away() -> None:
    fleet = decoders()
    assert planned(FOLLOW_UP, fleet, attempts=False) is None
    assert planned(FOLLOW_UP, Fleet(decoders=[])) is None
    for candidate in (one for worker in fleet.decoders for one in worker.targets):
        candidate.contract = CONTRACT.model_copy(update={"inactive": ["append_prefill"]})
    assert planned(FOLLOW_UP, fleet) is None


@pytest.mark.parametrize(("lead", "tried"), [(2, True), (3, False)])
def test_no_attempt_past_the_bound_and_none_at_the_next(lead: int, tried: bool) -> None:
    fleet = decoders()
    first = place(asked(session="s"), engines(8, 2))
    (home,) = [
        one for worker in fleet.decoders for one in worker.targets if (one.name, one.rank) == (first.name, first.rank)
    ]
    home.in_flight = lead
    assert (planned(FOLLOW_UP, fleet, max_lead=2) is not None) is tried
