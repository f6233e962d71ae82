"""Listens to what engines tell of their KV blocks, outside the path of requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from schedloom.core.errors import ConfigurationError
from schedloom.core.routing import Candidate, Held
from schedloom.router.events.ledger import BlockLedger, Prompt
from schedloom.router.fleet.fleet import Fleet
from schedloom.router.fleet.worker import Worker
from schedloom.router.tasks import stopped, within

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
REPLAY_SECONDS: Final = 10.0
_END = (-1).to_bytes(8, "big", signed=True)

_Place = tuple[str, str, int]


class Events:
    """What the engines of a fleet hold, each rank in each life by itself. Raises ConfigurationError without ZeroMQ."""

    def __init__(self, fleet: Fleet) -> None:
        try:
            import msgspec
            import zmq.asyncio
        except ImportError as error:
            raise ConfigurationError(
                "the KV events of engines need ZeroMQ; run pip install '/path/to/schedloom[kv-events]' (a checkout)"
            ) from error
        self._fleet = fleet
        self._decode: Callable[[bytes], Any] = msgspec.msgpack.decode
        self._context = zmq.asyncio.Context()
        self._ledgers: dict[_Place, BlockLedger] = {}
        self._tasks: dict[_Place, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._last = Prompt(())

    def of_prompt(self, candidate: Candidate, token_ids: Sequence[int], cache_salt: str | None) -> Held | None:
        ledger = self._ledgers.get((candidate.name, candidate.contract.epoch, candidate.rank))
        return None if ledger is None else ledger.of_prompt(self._known(token_ids, cache_salt))

    def of_session(self, candidate: Candidate, session: str) -> Held | None:
        ledger = self._ledgers.get((candidate.name, candidate.contract.epoch, candidate.rank))
        return None if ledger is None else ledger.of_session(session)

    def _known(self, token_ids: Sequence[int], cache_salt: str | None) -> Prompt:
        """The same for all candidates for one request."""
        last = self._last
        if last.token_ids is not token_ids or last.cache_salt != cache_salt:
            last = self._last = Prompt(token_ids, cache_salt)
        return last

    def start(self) -> None:
        self._looking = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        await stopped(*self._tasks.values(), self._looking)
        self._context.destroy(linger=0)

    async def _keep_looking(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Listen to every engine that tells, in the life it is in."""
        telling = {
            (worker.name, worker.contract.epoch, target.rank): worker
            for worker in self._fleet.workers
            if worker.known and worker.contract.kv_events_port
            for target in worker.targets
        }
        for place in self._tasks.keys() - telling.keys():
            self._tasks.pop(place).cancel()
            del self._ledgers[place]
        for place in telling.keys() - self._tasks.keys():
            ledger = self._ledgers[place] = BlockLedger()
            self._tasks[place] = asyncio.create_task(self._listen(telling[place], place[2], ledger))

    async def _listen(self, worker: Worker, rank: int, ledger: BlockLedger) -> None:
        contract = worker.contract
        assert contract.kv_events_port is not None
        replay = contract.kv_replay_port and _address(worker.origin, contract.kv_replay_port + rank)
        stream = _Stream(ledger, self._decode, replay, self._context)
        try:
            await stream.follow(_address(worker.origin, contract.kv_events_port + rank))
        except Exception:
            log.exception("the KV events of %s cannot be followed", worker.name)
            ledger.clear(is_whole=False)


class _Stream:
    """The events of one rank, in their order and without gaps; where one cannot be filled all is forgotten."""

    def __init__(self, ledger: BlockLedger, decode: Callable[[bytes], Any], replay: Any, context: Any) -> None:
        self._ledger = ledger
        self._decode = decode
        self._replay = replay
        self._context = context
        self._next = 0

    async def follow(self, address: str) -> None:
        import zmq

        with self._context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(address)
            await self._fill()
            while True:
                _, number, payload = await socket.recv_multipart()
                await self._take(int.from_bytes(number, "big"), payload)

    async def _take(self, number: int, payload: bytes) -> None:
        if number > self._next:
            await self._fill()
        self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        """Each batch once; what was missed for good leaves nothing known."""
        if number < self._next:
            return
        if number > self._next:
            self._ledger.clear(is_whole=False)
        elif number == 0:
            self._ledger.is_whole = True
        self._next = number + 1
        self._ledger.apply(self._decode(payload)[1])

    async def _fill(self) -> None:
        """What was missed, as far as the engine still has it."""
        if not self._replay:
            return
        try:
            await within(REPLAY_SECONDS, self._ask_again())
        except asyncio.TimeoutError:
            log.warning("%s does not tell its KV events again", self._replay)

    async def _ask_again(self) -> None:
        import zmq

        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay)
            await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            while True:
                _, _, number, payload = await socket.recv_multipart()
                if number == _END:
                    break
                self._apply(int.from_bytes(number, "big"), payload)
        if self._next == 0:
            self._ledger.is_whole = True


def _address(origin: str, port: int) -> str:
    host = urlsplit(origin).hostname or ""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
