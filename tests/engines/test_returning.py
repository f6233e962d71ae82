"""A5, A6, A9, B1: what a real Decoder hands back, it continues from the ticket, token for token, on both model runners.

No router: the test sends the tickets itself, to the same server. Its pool holds about half of what it is asked at once.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from schedloom.core.continuation import CONTINUABLE_KEY, RESUME_KEY, HandBack, digest
from schedloom.core.wire import PROTOCOL_VERSION, REJECTION_PREFIX
from schedloom.demo.engines import Engine, Fleet
from schedloom.demo.model import cached_model
from tests.engines.test_decoder import decoder_spec, post, prompt, until_none

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

RECOMPUTE_ON = {"scheduler_config": {"policies": [{"name": "recompute", "min_returned_tokens": 1}]}}
FEW_BLOCKS = ("--num-gpu-blocks-override=26", "--max-model-len=512")
AT_ONCE = 6
ANSWER = 100
MOST_TIMES = 4
HAND_BACKS, MOST_WAVES = 5, 6
MARK = {CONTINUABLE_KEY: PROTOCOL_VERSION}


@pytest.fixture(scope="module", params=["v1", "v2"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    specification = decoder_spec(request.param, additional_config=RECOMPUTE_ON, arguments=FEW_BLOCKS)
    with Fleet([specification], cached_model(), tmp_path_factory.mktemp("logs")) as fleet:
        yield fleet.engines["decoder"]


@dataclass
class Answer:
    """What one connection told: the tokens, the text, how it ended, and its usage."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    stop_reason: Any = None
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, part: dict[str, Any]) -> None:
        self.usage = part.get("usage") or self.usage
        for choice in part["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            self.text += said.get("content") or ""
            self.token_ids += choice.get("token_ids") or []
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.stop_reason = choice.get("stop_reason") or self.stop_reason


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """Completions and chat, each whole and streamed."""
    body: dict[str, Any] = {"max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    if number % 2:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if number % 4 < 2:
        return "/v1/completions", body | {"prompt": prompt(number, 60 + number)}
    text = "".join(map(chr, prompt(number, 50)))
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}


def ask(decoder: Engine, number: int, **more: Any) -> Answer:
    path, body = body_of(number)
    told, answer = post(decoder, path, body | more, timeout=240), Answer()
    events = told.split("\n\n") if body.get("stream") else [f"data: {told}"]
    for event in events:
        if event.startswith("data: {"):
            answer.take(json.loads(event.removeprefix("data: ")))
    return answer


def ask_until_answered(decoder: Engine, number: int) -> tuple[Answer, int]:
    """The last connection's answer, and how many handed the request back; what each told is checked on the way."""
    more: dict[str, Any] = MARK
    for times in range(MOST_TIMES + 1):
        answer = ask(decoder, number, vllm_xargs=more)
        handed = HandBack.read(answer.stop_reason)
        if handed is None:
            return answer, times
        assert answer.finish_reason == "stop"
        assert answer.token_ids == list(handed.output)
        more = {RESUME_KEY: handed.ticket.written()} | (MARK if times + 1 < MOST_TIMES else {})
    raise AssertionError("the last continuation is not marked, so that it is not handed back")


def test_what_is_handed_back_goes_on_exactly(decoder: Engine) -> None:
    handed_back = 0
    for wave in range(MOST_WAVES):
        numbers = range(wave * AT_ONCE, (wave + 1) * AT_ONCE)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            told = list(pool.map(lambda number: ask_until_answered(decoder, number), numbers))
        for number, (answer, times) in zip(numbers, told, strict=True):
            undisturbed = ask(decoder, number, cache_salt="no reuse")
            assert (answer.token_ids, answer.text) == (undisturbed.token_ids, undisturbed.text)
            assert (answer.finish_reason, answer.stop_reason) == ("length", None)
            for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert answer.usage[count] == undisturbed.usage[count]
            cached = (answer.usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            assert cached <= answer.usage["prompt_tokens"]
            handed_back += times
        if handed_back >= HAND_BACKS:
            break
    assert handed_back >= HAND_BACKS, f"only {handed_back} hand-backs"
    until_none(decoder, "vllm:num_requests_running", "vllm:num_requests_waiting")
    print(f"{handed_back} hand-backs, all answers exact")


def test_another_prompt_is_not_continued(decoder: Engine) -> None:
    ticket = HandBack("preempted", [1, 2, 3], [4]).ticket
    assert ticket.prompt_digest == digest([1, 2, 3])
    answer = ask(decoder, 0, vllm_xargs={RESUME_KEY: ticket.written()})
    assert answer.stop_reason == REJECTION_PREFIX + "prompt_differs"
    assert answer.token_ids == []
