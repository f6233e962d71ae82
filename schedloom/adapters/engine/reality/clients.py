"""Those who ask a real engine: what they ask for, what they get, and what an engine without any disturbance answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from schedloom.adapters.engine.reality.engines import BLOCK

TOP = 3
"""Log-probabilities that are compared of each token."""

TURNS = 10
FOLLOW_UPS = 6
ANSWER = 12
FOLLOW_UP_TOKENS = 88
PATIENT_HAND_BACKS = 3

LogProbs = list[dict[int, float]]


@dataclass
class Client:
    """One request. ``local``: it is marked as a local attempt; ``continuable``: it may be handed back, and therefore
    asks for no log-probabilities; ``leaves``: it hangs up in the midst of the answer."""

    name: str
    prompt: list[int]
    session: str
    job: str | None = None
    local: bool = False
    continuable: bool = False
    leaves: bool = False
    attempts: int = 0
    ends: int = 0
    left: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: LogProbs | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        return {"logprobs": None if self.continuable else TOP}

    def take(self, answer: Any) -> None:
        """The end of its answer, as vLLM's ``CompletionOutput``."""
        self.ends += 1
        self.tokens = list(answer.token_ids)
        if answer.logprobs is not None:
            self.logprobs = [{token: found.logprob for token, found in place.items()} for place in answer.logprobs]


def first_turns(seed: int, hand_back: bool, name: str = "first") -> list[Client]:
    """Prompts that two blocks hold, but not with their answers. A third of them are batch jobs; where somebody hands
    back, every other one may be handed back."""
    chance = random.Random(seed)
    return [
        Client(
            name=f"{name}-{number}",
            prompt=text(chance, chance.randint(2 * BLOCK - 8, 2 * BLOCK - 3)),
            session=f"session of {name}-{number}",
            job="batch" if chance.random() < 0.3 else None,
            continuable=hand_back and bool(number % 2),
            leaves=number == TURNS // 2,
        )
        for number in range(TURNS)
    ]


def follow_ups(seed: int, before: Sequence[Client], answers: Sequence[Sequence[int]], local: bool) -> list[Client]:
    """The next turns of those in ``before`` who were answered last, each with its whole history."""
    chance = random.Random(-seed - 1)
    clients = []
    for client, answer in list(zip(before, answers, strict=True))[: -FOLLOW_UPS - 1 : -1]:
        history = [*client.prompt, *answer]
        prompt = history + text(chance, FOLLOW_UP_TOKENS - len(history))
        name = client.name.replace("first", "next")
        clients.append(Client(name, prompt, client.session, local=local, continuable=client.continuable))
    clients[-1].leaves = True
    return clients


def text(chance: random.Random, length: int) -> list[int]:
    return chance.choices(range(32, 122), k=length)


def sampling(client: Client, **extra: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=ANSWER,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        extra_args=extra or None,
        **client.sampling,
    )


def alone(engine: Any, clients: Sequence[Client]) -> dict[str, tuple[list[int], LogProbs]]:
    """What ``engine``, which has room for everybody, answers."""
    asked = {client.name: Client(client.name, client.prompt, client.session) for client in clients}
    for client in asked.values():
        engine.llm_engine.add_request(client.name, {"prompt_token_ids": client.prompt}, sampling(client))
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            if output.finished:
                asked[output.request_id].take(output.outputs[0])
    return {name: (client.tokens, client.logprobs or []) for name, client in asked.items()}
