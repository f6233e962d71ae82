"""A cell of T3: a tight engine with policies, disturbed in every way it provides for, against an undisturbed one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schedloom.adapters.engine.peers import LoadBoard
from schedloom.adapters.engine.reality.clients import (
    PATIENT_HAND_BACKS,
    Client,
    LogProbs,
    alone,
    first_turns,
    follow_ups,
    sampling,
)
from schedloom.adapters.engine.reality.engines import BLOCK, MAX_SEQUENCES, connectors, core_of, neighbour, scheduler_of
from schedloom.adapters.engine.reality.squeeze import Squeeze
from schedloom.adapters.engine.reality.witness import Witness
from schedloom.core.continuation import CONTINUABLE_KEY, RESUME_KEY, HandBack
from schedloom.core.wire import JOB_CLASS_KEY, LOCAL_ATTEMPT_KEY, PROTOCOL_VERSION, REJECTION_PREFIX

BLOCKS = 17
"""The null block, and sixteen for ten requests that come to need three each."""

MOST_ROUNDS = 4
"""Rounds of turns: two, and more while something that must happen has not."""

HOST_BYTES = "1MiB"
"""Room for the KV of a few preempted requests, not of all."""

PATIENCE_SECONDS = 120.0
FULL_SECONDS = 0.3
"""How long another rank says that it is full, at the beginning of each round of turns."""

REST_SECONDS = 5.0


class Play:
    """Plays one cell. ``case`` is its plain form, with the policies' settings, a seed and two ports."""

    def __init__(self, case: dict[str, Any], model: str) -> None:
        self.case = case
        self.violations: list[tuple[str, str]] = []
        self.pulls = case["connector"] in ("pull", "both")
        producer = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"} if self.pulls else None
        roomy = {"enable_prefix_caching": False, "kv_transfer_config": producer}
        self.undisturbed = neighbour(model, case["ports"][0], **roomy)
        self.engine = neighbour(model, case["ports"][1], **self._tight())
        self.witness = Witness(scheduler_of(self.engine))
        self.squeeze: Squeeze | None = None
        self.asked: dict[str, Client] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="schedloom-")
        policies = getattr(scheduler_of(self.engine), "policies", None)
        self.judged = policies is not None and bool(policies.of("admit") or policies.of("screen"))
        self.hands_back = policies is not None and any(policy.hands_back for policy in policies.policies)
        reads_peers = policies is not None and any(policy.reads_peers for policy in policies.policies)
        self.peer = self._peer() if reads_peers else None

    def _tight(self) -> dict[str, Any]:
        chunks = {"long_prefill_token_threshold": BLOCK} if self.case["chunked"] else {}
        policies = self.case["settings"]
        return {
            "asynchronous": self.case["asynchronous"],
            "enable_prefix_caching": self.case["prefix_caching"],
            "num_gpu_blocks_override": BLOCKS,
            "max_model_len": (BLOCKS - 1) * BLOCK,
            "max_num_batched_tokens": 2 * MAX_SEQUENCES * BLOCK,
            "kv_transfer_config": connectors(self.case["connector"], HOST_BYTES),
            "additional_config": {"scheduler_config": {"policies": policies}} if policies else {},
            **chunks,
        }

    def _peer(self) -> LoadBoard:
        """A data-parallel rank that only tells its load. It is a fake."""
        path = Path(self.folder.name) / "board"
        scheduler_of(self.engine).view.board = LoadBoard(path, rank=0)
        return LoadBoard(path, rank=1)

    def run(self) -> dict[str, Any]:
        seed = self.case["seed"]
        firsts = first_turns(seed, self.hands_back)
        answers = self._round(firsts)
        self.squeeze = Squeeze(scheduler_of(self.engine), self._misses_something)
        self._round(follow_ups(seed, firsts, answers, self.judged))
        for number in range(2, MOST_ROUNDS):
            if self._misses_something():
                self._round(first_turns(hash((seed, number)), self.hands_back, f"more-{number}"))
        self.squeeze.relax()
        self._rest()
        self.folder.cleanup()
        self.violations += [("LIVE-3", sentence) for sentence in self.witness.failures()]
        return {"steps": self.witness.steps, "events": self.witness.all_events(), "violations": self.violations}

    def _misses_something(self) -> bool:
        events = self.witness.all_events()
        return not all(events[event] for event in self.case["needs"])

    def _round(self, clients: Sequence[Client]) -> list[list[int]]:
        """Serve ``clients`` and judge what they got; what they should have got. An engine that raises is a finding, and
        no reason not to look at what it has answered."""
        expected = alone(self.undisturbed, clients)
        self._serve_and_note(clients)
        for client in clients:
            self._judge(client, *expected[client.name])
        return [expected[client.name][0] for client in clients]

    def _serve_and_note(self, clients: Sequence[Client]) -> None:
        try:
            self._serve(clients)
        except TimeoutError as error:
            self._accuse("LIVE-1", str(error))
        except Exception as error:
            self._accuse("LIVE-3", f"{type(error).__name__}: {error}")

    def _serve(self, clients: Sequence[Client]) -> None:
        self._send_through_prefiller([client for client in clients if not client.local])
        for client in clients:
            if client.local:
                self._send(client)
        began = time.monotonic()
        while self.engine.llm_engine.has_unfinished_requests():
            if time.monotonic() - began > PATIENCE_SECONDS:
                raise TimeoutError(f"it still has work after {PATIENCE_SECONDS:.0f} s")
            if self.squeeze is not None:
                self.squeeze.look()
            self._step(time.monotonic() - began)

    def _step(self, elapsed: float) -> None:
        if self.peer is not None:
            self.peer.publish(MAX_SEQUENCES if elapsed < FULL_SECONDS else 0, 0, MAX_SEQUENCES, 0.5)
        for output in self.engine.llm_engine.step():
            client = self.asked[output.request_id]
            if output.finished:
                self._ended(client, output.outputs[0])
            elif client.leaves and len(output.outputs[0].token_ids) > 1 and not client.left:
                client.left = True
                self.witness.events["client left"] += 1
                self.engine.llm_engine.abort_request([output.request_id])

    # As the router does

    def _send(self, client: Client, **extra: Any) -> None:
        client.attempts += 1
        if client.local:
            extra[LOCAL_ATTEMPT_KEY] = PROTOCOL_VERSION
        if client.continuable and client.attempts <= PATIENT_HAND_BACKS:
            extra[CONTINUABLE_KEY] = PROTOCOL_VERSION
        if client.job:
            extra[JOB_CLASS_KEY] = client.job
        name, prompt = f"{client.name}.{client.attempts}", {"prompt_token_ids": client.prompt}
        self.asked[name] = client
        self.engine.llm_engine.add_request(name, prompt, sampling(client, **extra), session_id=client.session)

    def _send_through_prefiller(self, clients: Sequence[Client], output: Sequence[int] = (), **extra: Any) -> None:
        """Have the KV of their prompts, and of ``output``, computed where that is done."""
        transfers = self._prefilled(clients, output) if self.pulls else {}
        for client in clients:
            transfer = {"kv_transfer_params": transfers[client.name]} if transfers else {}
            self._send(client, **transfer, **extra)

    def _prefilled(self, clients: Sequence[Client], output: Sequence[int]) -> dict[str, Any]:
        prefiller = self.undisturbed.llm_engine
        for client in clients:
            prompt = {"prompt_token_ids": [*client.prompt, *output]}
            parameters = sampling(client, kv_transfer_params={"do_remote_decode": True})
            parameters.max_tokens = 1
            prefiller.add_request(client.name, prompt, parameters)
        transfers: dict[str, Any] = {}
        while len(transfers) < len(clients):
            done = [found for found in prefiller.step() if found.finished]
            transfers |= {found.request_id: found.kv_transfer_params for found in done}
        return transfers

    def _ended(self, client: Client, answer: Any) -> None:
        handed = HandBack.read(answer.stop_reason)
        if str(answer.stop_reason).startswith(REJECTION_PREFIX):
            self._rejected(client, answer)
        elif handed is not None:
            self._handed_back(client, answer, handed)
        else:
            client.take(answer)

    def _rejected(self, client: Client, answer: Any) -> None:
        self.witness.events["rejected"] += 1
        if not client.local or answer.token_ids:
            self._accuse("REJ-1", f"{client.name} was rejected with {len(answer.token_ids)} tokens of output")
        client.local = False
        self._send_through_prefiller([client])

    def _handed_back(self, client: Client, answer: Any, handed: HandBack) -> None:
        self.witness.events["handed back"] += 1
        if list(handed.prompt) != client.prompt or list(handed.output) != list(answer.token_ids):
            self._accuse("RET-2", f"{client.name} was handed back with other tokens than it had")
        client.local = False
        self._send_through_prefiller([client], handed.output, **{RESUME_KEY: handed.ticket.written()})

    # Afterwards

    def _rest(self) -> None:
        """Whatever is still to be told between the engines is told; then nobody owns a block."""
        engines = {"the engine": self.engine, "the undisturbed engine": self.undisturbed}
        until = time.monotonic() + REST_SECONDS
        while time.monotonic() < until and any(map(_held, engines.values())):
            for engine in engines.values():
                core_of(engine).step_fn()
            time.sleep(0.01)
        left = {name: _held(engine) for name, engine in engines.items()}
        self.violations += [("KV-2", f"{name} is left with {what}") for name, what in left.items() if what]

    def _judge(self, client: Client, tokens: list[int], logprobs: LogProbs) -> None:
        if client.left:
            return
        self.witness.events["token"] += len(client.tokens)
        if client.ends != 1:
            self._accuse("OUT-1", f"{client.name} ended {client.ends} times")
        elif len(client.tokens) != len(tokens):
            self._accuse("OUT-2", f"{client.name} got {len(client.tokens)} tokens instead of {len(tokens)}")
        elif client.tokens != tokens:
            self._accuse("TOK-1", f"{client.name} got {client.tokens} instead of {tokens}")
        elif client.logprobs is not None:
            self._judge_logprobs(client.name, client.logprobs, logprobs)

    def _judge_logprobs(self, name: str, found: LogProbs, expected: LogProbs) -> None:
        """Both are bit for bit the same where both engines are one model runner's, whatever else they do."""
        self.witness.events["log-probabilities compared"] += 1
        places = [place for place, _ in enumerate(expected) if found[place] != expected[place]]
        if places:
            there = f"token {places[0]} on: {found[places[0]]} instead of {expected[places[0]]}"
            self._accuse("TOK-1", f"{name} has other log-probabilities from {there}")

    def _accuse(self, invariant: str, sentence: str) -> None:
        self.violations.append((invariant, sentence))


def _held(engine: Any) -> str:
    """What an idle engine should not have: requests, and blocks that somebody owns."""
    scheduler = scheduler_of(engine)
    pool = scheduler.kv_cache_manager.block_pool
    owned = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return f"{len(scheduler.requests)} requests and {owned} blocks" if owned or scheduler.requests else ""
