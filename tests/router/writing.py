"""Simulated engines between which KV is written: fakes that keep to what was measured on vLLM 0.32.

A Decoder that registered keeps its blocks until the Prefiller has written them, whether or not its request still lives.
A Prefiller keeps what it computed until it has written it, or to the end of its lease. One that restarted knows nothing
of before.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

from schedloom.core.wire import CONTRACT_PATH, KvEndpoint, Role
from schedloom.router.app import RouterApp
from schedloom.router.http.upstream import (
    BrokenOff,
    ConnectFailed,
    TimedOut,
    TooLate,
    UpstreamError,
    UpstreamRequest,
    UpstreamResponse,
)
from schedloom.router.laboratory.client import Client
from schedloom.router.laboratory.engines import LEASE, WORDS
from schedloom.router.laboratory.town import HANDOFF, Turn
from schedloom.router.settings import router_settings
from tests.router.fakes import EVENTS, JSON, contract

HEALTH_INTERVAL = 20.0

Work = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Faults:
    """How likely each is, for each request that reaches an engine."""

    refuse: float = 0.0
    slow: float = 0.0
    error: float = 0.0
    full: float = 0.0
    client_error: float = 0.0
    fail_late: float = 0.0
    hang: float = 0.0
    cut: float = 0.0
    restart: float = 0.0
    stop: float = 0.0

    @classmethod
    def any(cls, random: random.Random) -> Faults:
        return cls(**{name: random.choice([0, 0, 0, 0.1, 0.3]) for name in cls.__dataclass_fields__})


@dataclass
class Ledger:
    wrongs: list[str] = field(default_factory=list)
    excused: set[str] = field(default_factory=set)
    """Request ids whose KV an engine keeps because the other side died, or a release failed."""
    prefills: dict[str, list[str]] = field(default_factory=dict)
    """The request ids of each client's request, one for each time that a Prefiller was asked."""
    computed: set[str] = field(default_factory=set)
    hung: set[str] = field(default_factory=set)
    """The request ids of those whose client did not wait any more for a Prefiller that hung."""
    dispatches: dict[str, int] = field(default_factory=dict)
    answers: Iterator[int] = field(default_factory=lambda: count(1))


class Exchange(UpstreamResponse):
    """One request on its way through an engine, which is told late that nobody listens any more."""

    def __init__(self, request: UpstreamRequest, random: random.Random) -> None:
        self.request = request
        self.body = json.loads(request.body)
        self.request_id = dict(request.headers)[b"x-request-id"].decode()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._random = random
        self._said: list[bytes] = []
        self._unread: list[bytes] = []
        self._complete = self._closed = False
        self._error: UpstreamError | None = None
        self._news = asyncio.Event()

    def start(self, work: Work) -> None:
        self._work = asyncio.ensure_future(work(self))

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def prefills(self) -> bool:
        return bool((self.body.get("kv_transfer_params") or {}).get("do_remote_decode"))

    @property
    def has_no_reader(self) -> bool:
        return self._closed

    def accept(self, status: int = 200) -> None:
        kind = EVENTS if self.streams and status == 200 else JSON
        self.status, self.headers = status, [(b"content-type", kind)]
        self._news.set()

    def say(self, data: bytes) -> None:
        self._said.append(data)
        self._unread.append(data)
        self._news.set()
        if self._closed:
            self._work.cancel()

    def finish(self) -> None:
        self._complete = True
        self._news.set()
        if self._closed:
            self._tell_late()

    def break_off(self, error: UpstreamError) -> None:
        self._error = error
        self._news.set()

    @property
    def waits(self) -> bool:
        return not self._closed and self.request.waits(bool(self._said))

    def give_up(self) -> None:
        Town.now.ledger.hung.add(self.request_id)
        if self.request.give_up():
            self.break_off(TimedOut("hangs"))

    async def head(self) -> Exchange:
        while not self.status:
            await self._wait(self.request.timeouts.first_byte)
        return self

    async def read(self) -> bytes:
        while not self._unread:
            if self._complete:
                return b""
            await self._wait(self.request.timeouts.silence)
        return self._unread.pop(0)

    async def _wait(self, seconds: float) -> None:
        if self._error is not None:
            raise self._error
        self._news.clear()
        news = asyncio.ensure_future(self._news.wait())
        try:
            done, _ = await asyncio.wait({news}, timeout=seconds)
        finally:
            news.cancel()
        if not done:
            raise TimedOut("silent")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        if isinstance(self._error, TimedOut):
            self._work.cancel()
        elif self._complete:
            if self._unread:
                self._tell_late()
        elif self.request.on_late_answer is not None or self._said or not self.request.settle_seconds:
            loop.call_later(self._random.choice([0, 0.002]), self._work.cancel)
        else:
            loop.call_later(self.request.settle_seconds, self._work.cancel)

    def _tell_late(self) -> None:
        if self.request.on_late_answer is not None:
            self.request.on_late_answer(self.status, b"".join(self._said))


@dataclass(eq=False)
class Engine:
    origin: str
    role: Role
    random: random.Random
    faults: Faults
    ledger: Ledger
    lives: int = 1
    leases: dict[str, float] = field(default_factory=dict)
    registered: dict[str, Engine] = field(default_factory=dict)
    waiting: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    stopped_until: float = -math.inf
    connector: ClassVar[str] = "NixlPushConnector"

    @property
    def engine_id(self) -> str:
        return f"{self.origin}#{self.lives}"

    @property
    def contract(self) -> Any:
        endpoint = KvEndpoint(engine_id=self.engine_id, host="10.0.0.1", port=5600)
        return contract(
            self.role,
            epoch=f"life-{self.lives}",
            kv_lease_seconds=LEASE,
            kv_connectors=[self.connector],
            kv_endpoints=[endpoint],
        )

    def happens(self, fault: str) -> bool:
        return self.random.random() < float(getattr(self.faults, fault))

    def restart(self) -> None:
        self.lives += 1
        self.ledger.excused |= {*self.leases, *self.registered, *self.waiting}
        self.leases.clear()
        self.registered.clear()
        self.waiting.clear()

    def stop(self) -> None:
        self.stopped_until = asyncio.get_running_loop().time() + self.random.choice([5, 50, 200])

    @property
    def is_stopped(self) -> bool:
        return self.stopped_until > asyncio.get_running_loop().time()

    async def goes_on(self) -> None:
        while self.is_stopped:
            await asyncio.sleep(self.stopped_until - asyncio.get_running_loop().time())

    async def serve(self, exchange: Exchange) -> None:
        if self.is_stopped and not exchange.prefills:
            # It may register after the lease, or not at all.
            self.ledger.excused.add(exchange.request_id)
        await self.goes_on()
        await self._serve(exchange)

    async def _serve(self, exchange: Exchange) -> None:
        for fault, status in (("error", 500), ("full", 503), ("client_error", 400)):
            if self.happens(fault):
                if (status == 500 or exchange.has_no_reader) and not exchange.prefills:
                    # Nobody can tell whether it had registered, or nobody hears it: the KV stays to the lease.
                    self.ledger.excused.add(exchange.request_id)
                exchange.accept(status)
                exchange.say(json.dumps({"error": {"message": fault, "code": status}}).encode())
                return exchange.finish()
        parameters = exchange.body.get("kv_transfer_params") or {}
        if parameters.get("do_remote_decode"):
            await self._prefill(exchange)
        else:
            await self._decode(exchange, parameters)

    async def _prefill(self, exchange: Exchange) -> None:
        life = self.lives
        exchange.accept()
        await asyncio.sleep(self.random.choice([0.001, 0.05, 2]))
        if life != self.lives:
            return exchange.break_off(BrokenOff("restarted"))
        await self.goes_on()
        if self.happens("hang"):
            return
        if self.happens("fail_late"):
            exchange.say(b'data: {"error": {"message": "late", "code": 500}}\n\ndata: [DONE]\n\n')
            return exchange.finish()
        self._computed(exchange.request_id)
        if self.happens("cut"):
            # It is asked again, because it may not have come so far; nobody fetches what it computes then.
            self.ledger.excused.add(exchange.request_id)
            return exchange.break_off(BrokenOff("cut"))
        exchange.say(b'data: {"choices": []}\n\ndata: [DONE]\n\n')
        exchange.finish()

    def _computed(self, request_id: str) -> None:
        self.ledger.computed.add(request_id)
        if Town.now.decoders_are_down():
            self.ledger.excused.add(request_id)
        reader = self.registered.pop(request_id, None)
        if reader is not None:
            return reader.written(request_id)
        expiry = self.leases[request_id] = asyncio.get_running_loop().time() + LEASE
        asyncio.get_running_loop().call_at(expiry, self._expire, request_id, expiry)

    def _expire(self, request_id: str, expiry: float) -> None:
        if self.leases.get(request_id) == expiry:
            del self.leases[request_id]
            if request_id not in self.ledger.excused:
                self.ledger.wrongs.append(f"{request_id}: nobody fetched it before its lease ended")

    def written(self, request_id: str) -> None:
        arrived = self.waiting.pop(request_id, None)
        if arrived is not None and not arrived.done():
            arrived.set_result(None)

    async def _decode(self, exchange: Exchange, parameters: Any) -> None:
        if exchange.streams:
            exchange.accept()
        await asyncio.sleep(self.random.choice([0, 0.001, 0.2]))
        if parameters and not await self._received(exchange, parameters):
            return
        if self.happens("hang"):
            return
        await self._answer(exchange)

    async def _received(self, exchange: Exchange, parameters: Any) -> bool:
        source = Town.now.by_engine_id(parameters["remote_engine_id"])
        if source is None:
            self.ledger.excused.add(exchange.request_id)
            exchange.accept(500)
            exchange.say(b'{"error": {"message": "no handshake", "code": 500}}')
            exchange.finish()
            return False
        request_id = exchange.request_id
        arrived = self.waiting[request_id] = asyncio.get_running_loop().create_future()
        if source.leases.pop(request_id, None) is not None:
            self.written(request_id)
        else:
            source.registered[request_id] = self
        await asyncio.shield(arrived)
        return True

    async def _answer(self, exchange: Exchange) -> None:
        await self.goes_on()
        number = next(self.ledger.answers)
        words = [f"{number}.{word} " for word in range(WORDS)]
        cut = self.random.randrange(WORDS) if self.happens("cut") else None
        if not exchange.streams:
            if cut is not None:
                return exchange.break_off(BrokenOff("cut"))
            exchange.accept()
            exchange.say(json.dumps({"choices": [{"index": 0, "text": "".join(words)}]}).encode())
            return exchange.finish()
        for place, word in enumerate(words):
            if place == cut:
                return exchange.break_off(BrokenOff("cut"))
            exchange.say(b"data: " + json.dumps({"choices": [{"index": 0, "text": word}]}).encode() + b"\n\n")
            await asyncio.sleep(0.01)
            await self.goes_on()
        exchange.say(b"data: [DONE]\n\n")
        exchange.finish()


class LayerwiseEngine(Engine):
    """A Decoder asks the router for its prefill, whether or not its request still lives when it gets to it."""

    connector = "MooncakeLayerwiseConnector"

    async def _received(self, exchange: Exchange, parameters: Any) -> bool:
        arrived = self.waiting[exchange.request_id] = asyncio.get_running_loop().create_future()
        Town.now.later(self._ask(exchange.request_id, parameters["metaserver"]))
        await asyncio.shield(arrived)
        return True

    async def _ask(self, request_id: str, address: str) -> None:
        await asyncio.sleep(self.random.choice([0, 0.002, 1]))
        body = {"request_id": f"cmpl-{request_id}-0", "do_remote_decode": True}
        body |= {"remote_engine_id": self.engine_id, "remote_host": "10.0.0.1", "remote_port": 5600}
        await Client(Town.now.app).post(f"/{address.split('/', 3)[3]}", body)

    async def _prefill(self, exchange: Exchange) -> None:
        life, reader = self.lives, Town.now.by_engine_id(exchange.body["kv_transfer_params"]["remote_engine_id"])
        await asyncio.sleep(self.random.choice([0.001, 0.05, 2]))
        await self.goes_on()
        if life != self.lives or self.happens("fail_late"):
            return exchange.break_off(BrokenOff("half way"))
        self.ledger.computed.add(exchange.request_id)
        if reader is not None:
            reader.written(exchange.request_id)
        if self.happens("cut"):
            return exchange.break_off(BrokenOff("cut"))
        exchange.accept()
        exchange.say(b'{"choices": []}')
        exchange.finish()


class Wire:
    """``Upstream`` between the router and these engines."""

    def __init__(self, engines: list[Engine], ledger: Ledger) -> None:
        self.engines = {engine.origin: engine for engine in engines}
        self.ledger = ledger
        self.open: set[Exchange] = set()

    def heard_at(self, origin: str) -> float:
        return 0.0

    def give_up(self, origin: str) -> int:
        waiting = [one for one in self.open if one.request.origin == origin and one.waits]
        for exchange in waiting:
            exchange.give_up()
        return len(waiting)

    def forget(self, origin: str) -> None:
        return None

    async def close(self) -> None:
        return None

    async def send(self, request: UpstreamRequest) -> Any:
        engine = self.engines[request.origin]
        if request.path == CONTRACT_PATH:
            await self._look_at(engine, request)
            return _Page(engine.contract.model_dump_json().encode())
        exchange = Exchange(request, engine.random)
        self._count(exchange)
        try:
            await self._reach(engine, request, exchange)
        except asyncio.CancelledError:
            if request.settle_seconds:
                exchange.start(engine.serve)
                exchange.close()
            raise
        exchange.start(engine.serve)
        self.open.add(exchange)
        exchange._work.add_done_callback(lambda _: self.open.discard(exchange))
        try:
            return await exchange.head()
        except BaseException:
            if exchange.status >= 400:
                # Its client left in the very moment in which it was refused.
                self.ledger.excused.add(exchange.request_id)
            exchange.close()
            raise

    async def _look_at(self, engine: Engine, request: UpstreamRequest) -> None:
        if engine.is_stopped:
            await asyncio.sleep(request.timeouts.first_byte)
            raise TimedOut(request.origin)

    def _count(self, exchange: Exchange) -> None:
        prefills = bool(exchange.body["kv_transfer_params"]["do_remote_decode"])
        releases = exchange.body.get("max_tokens") == 1 and not prefills
        label = exchange.body["label"]
        self.ledger.prefills.setdefault(label, []).extend([exchange.request_id] * prefills)
        self.ledger.dispatches[label] = self.ledger.dispatches.get(label, 0) + (not releases)
        if releases and any(exchange.request_id in engine.leases for engine in self.engines.values()):
            # One Decoder is asked to take over, and may fail as any other.
            self.ledger.excused.add(exchange.request_id)

    async def _reach(self, engine: Engine, request: UpstreamRequest, exchange: Exchange) -> None:
        now = asyncio.get_running_loop().time
        delay = engine.random.choice([0, 0.001, 0.01]) + (engine.happens("slow") and engine.random.uniform(5, 30))
        if request.dispatch_by is not None and now() + delay > request.dispatch_by:
            await asyncio.sleep(request.dispatch_by - now())
            raise TooLate(request.origin)
        await asyncio.sleep(delay)
        if engine.happens("restart"):
            engine.restart()
        if engine.faults.stop and not engine.is_stopped and engine.happens("stop"):
            engine.stop()
        if engine.happens("refuse"):
            raise ConnectFailed(request.origin)


class _Page(UpstreamResponse):
    def __init__(self, body: bytes) -> None:
        self.status, self.headers = 200, [(b"content-type", JSON)]
        self._steps = [body, b""]

    async def read(self) -> bytes:
        return self._steps.pop(0)

    def close(self) -> None:
        return None


class Town:
    """One fleet under one seed."""

    now: Town

    def __init__(self, seed: int, faults: Faults | None = None, kind: type[Engine] = Engine) -> None:
        Town.now = self
        self._later: set[asyncio.Future[None]] = set()
        self.random = random.Random(seed)
        self.ledger = Ledger()
        roles = [Role.PRODUCER] * self.random.randint(1, 3) + [Role.CONSUMER] * self.random.randint(1, 3)
        self.engines = [
            kind(f"http://e{number}:1", role, self.random, faults or Faults.any(self.random), self.ledger)
            for number, role in enumerate(roles)
        ]
        self.turns: list[Turn] = []

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def by_engine_id(self, engine_id: str) -> Engine | None:
        return next((engine for engine in self.engines if engine.engine_id == engine_id), None)

    def decoders_are_down(self) -> bool:
        """Whether the router may have nobody to hand over to: it sees late who goes on."""
        now = asyncio.get_running_loop().time()
        decoders = [engine for engine in self.engines if engine.role is Role.CONSUMER]
        return all(engine.stopped_until + 2 * HEALTH_INTERVAL > now for engine in decoders)

    async def play(self, clients: int = 4, turns: int = 3) -> None:
        settings = router_settings(
            {
                "workers": [{"url": engine.origin} for engine in self.engines],
                "handoff_timeout_seconds": HANDOFF,
                "request_timeout_seconds": 3000,
                "first_byte_timeout_seconds": 300,
                "health_interval_seconds": HEALTH_INTERVAL,
                "callback_url": "http://router:1",
            }
        )
        loop = asyncio.get_running_loop()
        self.app = RouterApp(settings, Wire(self.engines, self.ledger), clock=loop.time)
        await self.app.start()
        await asyncio.gather(*[self._client(number, turns) for number in range(clients)])
        await asyncio.sleep(2000)
        await self.app.close()

    async def _client(self, number: int, turns: int) -> None:
        for turn in range(turns):
            await asyncio.sleep(self.random.uniform(0, 3))
            await self._turn(f"{number}.{turn}")

    async def _turn(self, label: str) -> None:
        client, stream = Client(self.app), self.random.random() < 0.6
        body = {"model": "fake-model", "prompt": "a", "stream": stream, "label": label}
        left = self.random.random() < 0.3
        if left:
            delay = self.random.choice([0, 0.001, 0.005, 0.02, 0.06, 1, 7])
            asyncio.get_running_loop().call_later(delay, client.leave.set)
        received = await client.post("/v1/completions", body)
        self.turns.append(Turn(label, None, stream, left and client.leave.is_set(), received))
