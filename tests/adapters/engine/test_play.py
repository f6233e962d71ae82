"""C5: what a cell of T3 says of an engine that answers rightly, and of those that do not. The engines are fakes."""

from types import SimpleNamespace
from typing import Any

import pytest

from schedloom.adapters.engine.reality import clients, play
from schedloom.adapters.engine.reality.clients import ANSWER, FOLLOW_UPS, TURNS
from schedloom.adapters.engine.reality.play import MOST_ROUNDS, Play
from schedloom.core.wire import REJECTION_PREFIX


class FakeEngine:
    """Answers a token a step; the tokens are a function of the prompt. It is its own front end, core and scheduler."""

    def __init__(self) -> None:
        self.llm_engine = self.engine_core = self.scheduler = self
        self.asked: dict[str, Any] = {}
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        pool = SimpleNamespace(num_gpu_blocks=17, get_num_free_blocks=lambda: 16, free_blocks=lambda blocks: None)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def schedule(self) -> None:
        raise AssertionError("nobody schedules here")

    def step_fn(self) -> None:
        pass

    def add_request(self, name: str, prompt: Any, sampling: Any, session_id: str | None = None) -> None:
        self.asked[name] = (prompt["prompt_token_ids"], [])

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.asked[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.asked)

    def step(self) -> list[Any]:
        return [self.output(name, *self.asked[name]) for name in list(self.asked)]

    def output(self, name: str, prompt: list[int], tokens: list[int]) -> Any:
        tokens.append((sum(prompt) + len(tokens)) % 89)
        finished = len(tokens) == ANSWER
        if finished:
            del self.asked[name]
        return self.answer(name, list(tokens), finished)

    def answer(self, name: str, tokens: list[int], finished: bool) -> Any:
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in tokens]
        found = SimpleNamespace(token_ids=tokens, logprobs=logprobs, stop_reason=None)
        return SimpleNamespace(request_id=name, finished=finished, outputs=[found])


class WrongToken(FakeEngine):
    def answer(self, name: str, tokens: list[int], finished: bool) -> Any:
        return super().answer(name, [*tokens[:-1], 99], finished)


class WrongLogProb(FakeEngine):
    def answer(self, name: str, tokens: list[int], finished: bool) -> Any:
        output = super().answer(name, tokens, finished)
        output.outputs[0].logprobs[-1] = {tokens[-1]: SimpleNamespace(logprob=-0.50000006)}
        return output


class ShortAnswer(FakeEngine):
    def answer(self, name: str, tokens: list[int], finished: bool) -> Any:
        return super().answer(name, tokens[: ANSWER - 1], finished)


class Forgetful(FakeEngine):
    def answer(self, name: str, tokens: list[int], finished: bool) -> Any:
        return super().answer(name, tokens, finished and "first-0" not in name)


class RejectsUnmarked(FakeEngine):
    def answer(self, name: str, tokens: list[int], finished: bool) -> Any:
        output = super().answer(name, tokens, finished)
        if finished and name == "first-0.1":
            output.outputs[0].stop_reason = REJECTION_PREFIX + "no"
        return output


class Raising(FakeEngine):
    def step(self) -> list[Any]:
        raise ValueError("no more")

    def has_unfinished_requests(self) -> bool:
        return True


class Hoarding(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.requests = {"somebody": None}


def played(monkeypatch: pytest.MonkeyPatch, tried: type[FakeEngine], needs: tuple[str, ...] = ()) -> dict[str, Any]:
    engines = iter((FakeEngine(), tried()))
    monkeypatch.setattr(play, "neighbour", lambda *arguments, **settings: next(engines))
    monkeypatch.setattr(play, "REST_SECONDS", 0.05)
    for module in (clients, play):
        monkeypatch.setattr(module, "sampling", lambda client, **extra: SimpleNamespace(extra=extra))
    case = {"connector": "none", "ports": [1, 2], "chunked": False, "asynchronous": False, "prefix_caching": True}
    return Play({**case, "settings": [], "seed": 0, "needs": list(needs)}, "model").run()


def test_right_answers_are_counted_and_not_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    found = played(monkeypatch, FakeEngine, ("log-probabilities compared", "client left"))
    assert found["violations"] == []
    assert found["events"]["client left"] == 2
    assert found["events"]["log-probabilities compared"] == TURNS + FOLLOW_UPS - 2


def test_it_goes_on_while_something_has_not_happened_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    found = played(monkeypatch, FakeEngine, ("preempted",))
    assert found["events"]["client left"] == MOST_ROUNDS


@pytest.mark.parametrize(
    ("tried", "invariant"),
    [
        (WrongToken, "TOK-1"),
        (WrongLogProb, "TOK-1"),
        (ShortAnswer, "OUT-2"),
        (Forgetful, "OUT-1"),
        (RejectsUnmarked, "REJ-1"),
        (Raising, "LIVE-3"),
        (Hoarding, "KV-2"),
    ],
)
def test_each_wrong_has_its_name(monkeypatch: pytest.MonkeyPatch, tried: type[FakeEngine], invariant: str) -> None:
    accused = {name for name, _ in played(monkeypatch, tried)["violations"]}
    assert invariant in accused
    assert accused <= {invariant, "OUT-1"}
