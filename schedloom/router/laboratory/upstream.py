"""Between a router and simulated engines: what each answers, and what it notices of the others.

KV that is pulled after its lease or for another prompt, KV that nobody pulls and tickets that do not fit are written
down.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from schedloom.core.continuation import CONTINUABLE_KEY, RESUME_KEY, HandBack, Ticket, digest
from schedloom.core.wire import CONTRACT_PATH, LOCAL_ATTEMPT_KEY, REJECTION_PREFIX, Role
from schedloom.router.http.upstream import BrokenOff, ConnectFailed, TimedOut, TooLate, UpstreamRequest
from schedloom.router.laboratory.engines import (
    HEALTH_INTERVAL,
    LEASE,
    MODEL,
    WORDS,
    Ledger,
    Patients,
    SimulatedEngine,
    SimulatedResponse,
)
from schedloom.router.laboratory.ownership import Ownership


class SimulatedUpstream:
    def __init__(self, engines: list[SimulatedEngine], ledger: Ledger) -> None:
        self.engines = {engine.origin: engine for engine in engines}
        self.ledger = ledger
        self.ownership: Ownership | None = None
        self._patients = Patients()

    def heard_at(self, origin: str) -> float:
        return 0.0

    def give_up(self, origin: str) -> int:
        return self._patients.give_up(origin)

    def forget(self, origin: str) -> None:
        return None

    async def close(self) -> None:
        return None

    async def send(self, request: UpstreamRequest) -> SimulatedResponse:
        engine = self.engines[request.origin]
        if request.path == CONTRACT_PATH:
            await self._patients.wait(engine, request, request.timeouts.first_byte, has_begun=False)
            return _whole(engine.contract.model_dump(mode="json"))
        body = json.loads(request.body)
        if body["model"] != MODEL:
            return self._declined(body)
        label = _label(body)
        self.ledger.dispatches[label] = self.ledger.dispatches.get(label, 0) + 1
        if self.ownership is not None and (wrong := await self.ownership.wrong_with(request, body)):
            self.ledger.wrongs.append(f"{label}: {wrong}")
        try:
            await self._reach(engine, request)
        except asyncio.CancelledError:
            if engine.stopped_until > self._now():
                self._excuse(request)
            elif request.settle_seconds:
                self._take_over(body)
            raise
        response = await self._answer(engine, request, body)
        response.on_late_answer = request.on_late_answer
        if engine.faults.stop:
            silence = request.timeouts.silence
            response.awake = lambda has_begun: self._patients.wait(engine, request, silence, has_begun)
        return response

    def _declined(self, body: Any) -> SimulatedResponse:
        """A Decoder that does not know a model tells the Prefiller that its KV is not needed, which may know that."""
        source, _ = self._source(body["kv_transfer_params"])
        source.leases.pop(body["kv_transfer_params"]["remote_request_id"], None)
        return _whole({"error": {"message": "no such model", "code": 404}}, 404)

    async def _reach(self, engine: SimulatedEngine, request: UpstreamRequest) -> None:
        delay = engine.random.choice([0, 0.001, 0.01]) + (engine.happens("slow") and engine.random.uniform(5, 30))
        if request.dispatch_by is not None and self._now() + delay > request.dispatch_by:
            await asyncio.sleep(request.dispatch_by - self._now())
            self._excuse(request)
            raise TooLate(request.origin)
        await asyncio.sleep(delay)
        if engine.happens("restart"):
            engine.restart()
        await self._perhaps_stopped(engine, request)
        if engine.happens("refuse"):
            self._excuse(request)
            raise ConnectFailed(request.origin)

    async def _perhaps_stopped(self, engine: SimulatedEngine, request: UpstreamRequest) -> None:
        if engine.faults.stop and engine.stopped_until < self._now() and engine.happens("stop"):
            engine.stopped_until = self._now() + engine.random.choice([5, 50, 200, 2000])
        was_stopped = engine.stopped_until > self._now()
        try:
            await self._patients.wait(engine, request, request.timeouts.first_byte, has_begun=False)
        except TimedOut:
            self._excuse(request)
            raise
        if was_stopped and self._is_too_late(request):
            self._excuse(request)
            raise BrokenOff(f"{request.origin} went on after the lease of the KV that it was handed")

    def _is_too_late(self, request: UpstreamRequest) -> bool:
        parameters = json.loads(request.body).get("kv_transfer_params") or {}
        if not parameters.get("remote_block_ids"):
            return False
        source, _ = self._source(parameters)
        return source.leases.get(parameters["remote_request_id"], 0.0) < self._now()

    def _excuse(self, request: UpstreamRequest) -> None:
        """A Prefiller whose Decoder cannot be reached keeps its KV to the end of the lease."""
        parameters = json.loads(request.body).get("kv_transfer_params") or {}
        if parameters.get("remote_block_ids") is not None:
            source, _ = self._source(parameters)
            source.leases.pop(parameters["remote_request_id"], None)

    def _source(self, parameters: Any) -> tuple[SimulatedEngine, int]:
        """The Prefiller that keeps the KV, and the life in which it does."""
        origin, _, life = parameters["remote_engine_id"].rpartition("#")
        return self.engines[origin], int(life)

    async def _answer(self, engine: SimulatedEngine, request: UpstreamRequest, body: Any) -> SimulatedResponse:
        for fault, status in (("error", 500), ("full", 503), ("client_error", 400)):
            if engine.happens(fault):
                if fault == "error" or engine.random.random() < 0.5:
                    self._take_over(body)
                return _whole({"error": {"message": fault, "code": status}}, status)
        if engine.happens("hang"):
            self._take_over(body)
            await asyncio.sleep(request.timeouts.first_byte)
            raise TimedOut(request.origin)
        parameters = body.get("kv_transfer_params") or {}
        if parameters.get("do_remote_decode"):
            return self._prefill(engine, dict(request.headers)[b"x-request-id"].decode(), _tokens(body))
        self._take_over(body)
        body["request_id"] = dict(request.headers)[b"x-request-id"].decode()
        return self._decode(engine, dict(request.headers).get(b"x-session-id", b"").decode(), body)

    def _prefill(self, engine: SimulatedEngine, request_id: str, tokens: list[int]) -> SimulatedResponse:
        if engine.happens("no_parameters"):
            return _whole({"kv_transfer_params": None})
        end = engine.leases[request_id] = self._now() + LEASE
        if self._decoders_are_down():
            asyncio.get_running_loop().call_at(end, engine.leases.pop, request_id, None)
        source = {"remote_engine_id": f"{engine.origin}#{engine.lives}", "remote_request_id": request_id}
        return _whole({"kv_transfer_params": source | {"remote_block_ids": [tokens]}})

    def _decoders_are_down(self) -> bool:
        """Whether the router may have nobody to hand over to: it sees late who goes on."""
        decoders = [engine for engine in self.engines.values() if engine.role is not Role.PRODUCER]
        return all(engine.stopped_until + 2 * HEALTH_INTERVAL > self._now() for engine in decoders)

    def _take_over(self, body: Any) -> None:
        """A Decoder that has read a hand-over, whatever becomes of it, lets the Prefiller go."""
        parameters = body.get("kv_transfer_params") or {}
        if parameters.get("remote_block_ids") is None:
            return
        source, life = self._source(parameters)
        expiry = source.leases.pop(parameters["remote_request_id"], None)
        if source.lives == life and (expiry is None or expiry < self._now()):
            self.ledger.wrongs.append(f"{_label(body)}: KV pulled twice, or after its lease")
        if parameters["remote_block_ids"] != [_tokens(body)]:
            self.ledger.wrongs.append(f"{_label(body)}: KV of another prompt")

    def _decode(self, engine: SimulatedEngine, session: str, body: Any) -> SimulatedResponse:
        marked = (body.get("vllm_xargs") or {}).get(LOCAL_ATTEMPT_KEY) == 1
        if engine.happens("evict"):
            engine.holds.discard(session)
        if marked and body.get("kv_transfer_params"):
            self.ledger.wrongs.append(f"{_label(body)}: a local attempt with transfer parameters")
        if marked and session not in engine.holds:
            return self._said(engine, body, [], "stop", REJECTION_PREFIX + "no_usable_prefix")
        engine.holds.add(session)
        told = self._output_so_far(engine, body)
        number = told[0] // WORDS if told else next(self.ledger.answers)
        output = [number * WORDS + word for word in range(WORDS)]
        if _is_marked(body) and engine.recomputes and engine.happens("hand_back"):
            output = output[: engine.random.randint(len(told), WORDS)]
            self.ledger.handed_back[_label(body)] = self.ledger.handed_back.get(_label(body), 0) + 1
            handed_back = HandBack("preempted", _prompt(_label(body)), output)
            return self._said(engine, body, _words(output, len(told)), "stop", handed_back.stop_reason)
        return self._said(engine, body, _words(output, len(told)), "length", None)

    def _output_so_far(self, engine: SimulatedEngine, body: Any) -> list[int]:
        extra = body.get("vllm_xargs") or {}
        if RESUME_KEY not in extra and CONTINUABLE_KEY not in extra:
            return []
        if not engine.recomputes:
            self.ledger.wrongs.append(f"{_label(body)}: marks for an engine that does not know them")
        ticket = Ticket.read(extra[RESUME_KEY]) if RESUME_KEY in extra else None
        if ticket is None:
            return []
        if (
            ticket.prompt_digest != digest(_prompt(_label(body)))
            or "remote_block_ids" not in (body["kv_transfer_params"])
        ):
            self.ledger.wrongs.append(f"{_label(body)}: a ticket that does not fit")
        return list(ticket.output)

    def _said(
        self, engine: SimulatedEngine, body: Any, words: list[str], finish: str, stop_reason: str | None
    ) -> SimulatedResponse:
        end = {"index": 0, "finish_reason": finish, "stop_reason": stop_reason}
        head = {"id": body["request_id"], "created": 1}
        if not body.get("stream"):
            answer = _whole({"choices": [end | {"text": "".join(words)}]})
            return self._perhaps_cut(engine, answer)
        chunks = [head | {"choices": [{"index": 0, "text": word, "finish_reason": None}]} for word in words]
        finished = [head | {"choices": [end | {"text": ""}]}] if words or engine.random.random() < 0.5 else []
        events = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in [*chunks, *finished]]
        stream = b"".join([*events, b"data: [DONE]\n\n"])
        cuts = sorted(engine.random.sample(range(1, len(stream)), 3)) if engine.random.random() < 0.5 else []
        parts = [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)])]
        return self._perhaps_cut(engine, SimulatedResponse(list(parts), b"text/event-stream", 200, 0.01))

    def _perhaps_cut(self, engine: SimulatedEngine, response: SimulatedResponse) -> SimulatedResponse:
        if engine.happens("cut"):
            stream = b"".join(step for step in response._steps if isinstance(step, bytes))
            left = stream[: engine.random.randrange(len(stream))]
            error = engine.random.choice([BrokenOff("cut"), TimedOut("silent")])
            response._steps[:] = [left, error] if left else [error]
        return response

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _is_marked(body: Any) -> bool:
    return (body.get("vllm_xargs") or {}).get(CONTINUABLE_KEY) == 1


def _label(body: Any) -> str:
    """Which client's request a body is of: clients say it themselves, and the tokens of their prompts begin with it."""
    return str(body.get("user") or bytes(body["prompt"]).partition(b"\0")[0].decode())


def _prompt(label: str) -> list[int]:
    return list(f"{label}\0prompt".encode())


def _tokens(body: Any) -> list[int]:
    """Everything that a request needs the KV of."""
    if isinstance(body["prompt"], list):
        return list(body["prompt"])
    extra = body.get("vllm_xargs") or {}
    return _prompt(_label(body)) + (list(Ticket.read(extra[RESUME_KEY]).output) if RESUME_KEY in extra else [])


def _words(output: list[int], told: int) -> list[str]:
    """An answer's words; the first ``told`` of them come in one piece with the one behind them."""
    words = [f"{token // WORDS}.{token % WORDS} " for token in output]
    return ["".join(words[: told + 1]), *words[told + 1 :]] if words else []


def _whole(value: Any, status: int = 200) -> SimulatedResponse:
    return SimulatedResponse([json.dumps(value).encode()], b"application/json", status, 0.0)
