"""Who is in the fleet: contracts read at start, again and again, and after every trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from schedloom.core.errors import ConfigurationError, explain
from schedloom.core.wire import CONTRACT_PATH, EngineContract
from schedloom.router.failures import no_such_endpoint
from schedloom.router.fleet.checks import KINDS, all_drain, complaint, none_can, unnamed
from schedloom.router.fleet.fleet import Fleet
from schedloom.router.fleet.silence import Silences
from schedloom.router.fleet.worker import LEAVING, SERVING, Health, Worker
from schedloom.router.http.upstream import (
    ConnectFailed,
    TimedOut,
    Timeouts,
    Unanswered,
    Upstream,
    UpstreamError,
    UpstreamRequest,
    lines_of,
    read_soon,
)
from schedloom.router.keys import KEY_REFUSED, about_refused_key, engine_authorization
from schedloom.router.logs import common
from schedloom.router.settings import RouterSettings
from schedloom.router.tasks import stopped

_PAUSE_AT_START = 0.25
_MISSES_ALLOWED = 2
_LONGEST_REASON = 500
_LONGEST_PAGE = 2**22


class Membership:
    """Keeps ``fleet`` true to what the engines say of themselves."""

    def __init__(
        self,
        fleet: Fleet,
        upstream: Upstream,
        settings: RouterSettings,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._settings = settings
        self._sleep = sleep
        self._silences = Silences(upstream, settings.hung_after_seconds)
        self._looks: dict[Worker, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Look at every engine, and keep looking: the fleet serves already, whoever is missing or does not fit."""
        self._looking = asyncio.create_task(self._keep_looking())
        await self.look_at_all()
        self._tell_missing()

    async def start(self) -> None:
        """Look at every engine, waiting for those that are still starting, then keep looking.

        Raises ConfigurationError when an engine does not fit, or when no Prefiller or no Decoder is reached
        in time.
        """
        wait = self._settings.start_wait_seconds
        last = int(wait / _PAUSE_AT_START)
        for look in range(1 + last):
            await self.look_at_all()
            self._refuse_misfits()
            missing = [one for one in self._fleet.workers if one.health is not Health.READY and not one.drains]
            if not missing:
                break
            if look == 0 < last:
                common.info("waiting up to %g s for %s", wait, ", ".join(one.origin for one in missing))
            if look < last:
                await self._sleep(_PAUSE_AT_START)
        self._refuse_gaps()
        self._tell_missing()
        self._looking = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        await stopped(*self._looks.values(), self._looking)

    def suspect(self, worker: Worker) -> None:
        """A request had trouble with ``worker``: look at it now."""
        worker.suspect()
        self.look_soon(worker)

    def look_soon(self, worker: Worker) -> asyncio.Task[None]:
        """Without waiting for the next round."""
        task = self._looks.get(worker)
        if task is None:
            task = self._looks[worker] = asyncio.create_task(self._look_at(worker))
            task.add_done_callback(lambda _: self._looks.pop(worker, None))
        return task

    async def forget(self, worker: Worker) -> None:
        """Nobody looks at it any more."""
        await stopped(self._looks.get(worker))

    async def _keep_looking(self) -> None:
        while True:
            await self._sleep(self._settings.health_interval_seconds)
            await self.look_at_all()

    async def look_at_all(self) -> None:
        """Bring every worker up to date. Whoever is forgotten meanwhile is looked at no longer."""
        await asyncio.wait([*map(self.look_soon, self._fleet.workers)])

    async def _look_at(self, worker: Worker) -> None:
        """Whatever an engine says, the others are looked at."""
        try:
            await self._look(worker)
        except Exception as error:
            self._quarantine(worker, f"{worker.origin} says what makes no sense here: {error!r}"[:_LONGEST_REASON])

    async def _look(self, worker: Worker) -> None:
        began = asyncio.get_running_loop().time()
        try:
            contract = await self._contract_of(worker)
        except UpstreamError as error:
            self._missed(worker, str(error), at_once=isinstance(error, ConnectFailed))
            if isinstance(error, TimedOut | Unanswered):
                return self._silences.go_on(worker, began)
        except ConfigurationError as error:
            self._quarantine(worker, str(error))
        else:
            worker.misses = 0
            self._judge(worker, contract)
        self._silences.end(worker)

    def _missed(self, worker: Worker, trouble: str, *, at_once: bool) -> None:
        worker.misses += 1
        if not at_once and worker.known and worker.misses <= _MISSES_ALLOWED:
            worker.suspect()
            return
        if worker.health is not Health.DOWN:
            common.warning("%s is down: %s", worker.name, trouble)
        worker.leave(Health.DOWN, trouble)

    def _judge(self, worker: Worker, contract: EngineContract) -> None:
        others = [
            (other, other.contract)
            for other in self._fleet.workers
            if other is not worker and (other.health in SERVING or other.health in LEAVING)
        ]
        reason = complaint((worker, contract), others, self._settings)
        if reason is not None:
            self._quarantine(worker, reason)
            return
        if worker.known and worker.contract.epoch != contract.epoch:
            common.info("%s was restarted", worker.name)
        elif worker.health in (Health.DOWN, Health.QUARANTINED):
            came = "is there, and drains" if worker.drains else "joins"
            common.info("%s %s, at %s", worker.name, came, worker.origin)
        worker.join(contract)

    def _quarantine(self, worker: Worker, reason: str) -> None:
        if worker.trouble != reason and self._looking is not None:  # a start that fails tells it itself
            common.warning("%s is left out: %s", worker.name, reason)
        worker.leave(Health.QUARANTINED, reason)

    def _tell_missing(self) -> None:
        for worker in self._fleet.workers:
            if worker.health is Health.DOWN:
                common.warning("%s is not there yet: %s", worker.name, worker.trouble)

    def _refuse_misfits(self) -> None:
        if troubles := [worker.trouble for worker in self._fleet.workers if worker.health is Health.QUARANTINED]:
            raise ConfigurationError(*dict.fromkeys(troubles))

    def _refuse_gaps(self) -> None:
        needed = zip(KINDS, (self._fleet.prefillers, self._fleet.decoders), strict=True)
        gaps = [_nobody_reached(kind, role, self._fleet) for (kind, role), ready in needed if not ready]
        if gaps:
            raise ConfigurationError(*gaps)

    async def _contract_of(self, worker: Worker) -> EngineContract:
        """Raises UpstreamError when it cannot be asked, ConfigurationError when its answer cannot be used."""
        status, body = await self._get(worker, CONTRACT_PATH)
        if status == 200:
            return _read_contract(worker, body)
        if status != 404:
            raise UpstreamError(f"{worker.origin} answers {CONTRACT_PATH} with status {status}")
        if body == no_such_endpoint().body:
            raise ConfigurationError(f"{worker.origin} is a router, not an engine; name the engines behind it")
        declared = worker.settings.contract
        if declared is None:
            raise ConfigurationError(
                f"{worker.origin} does not serve {CONTRACT_PATH}; install schedloom in it and start it with "
                f"VLLM_PLUGINS=schedloom, or declare its contract under workers in the router's configuration"
            )
        status, _ = await self._get(worker, "/health")
        if status != 200:
            raise UpstreamError(f"{worker.origin} answers /health with status {status}")
        return declared.model_copy(update={"epoch": f"{declared.epoch}-{worker.lives}"})

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        timeout, shown = self._settings.health_timeout_seconds, engine_authorization(self._settings)
        lines = () if shown is None else (lines_of([(b"authorization", shown)]),)
        request = UpstreamRequest(worker.origin, "GET", path, lines, timeouts=Timeouts(timeout, timeout))
        response = await self._upstream.send(request)
        try:
            if response.status in KEY_REFUSED:
                raise UpstreamError(about_refused_key(worker.origin, shown, response.status))
            return response.status, await read_soon(response, timeout, _LONGEST_PAGE)
        finally:
            response.close()


def _read_contract(worker: Worker, body: bytes) -> EngineContract:
    try:
        return EngineContract.model_validate_json(body)
    except ValidationError as error:
        raise ConfigurationError(
            f"the contract of {worker.origin} cannot be read ({explain(error, EngineContract)}); run the "
            f"same release of schedloom in the engines and in the router"
        ) from error


def _nobody_reached(kind: str, role: str, fleet: Fleet) -> str:
    gap = unnamed(kind, role, (worker.settings for worker in fleet.workers))
    if gap is not None:
        return gap
    asked = [worker for worker in fleet.workers if worker.settings.role in (None, role)]
    there = [worker for worker in asked if worker.health in LEAVING]
    if any(worker.can_prefill if role == "prefill" else worker.can_decode for worker in there):
        return all_drain(kind)
    troubles = "; ".join(worker.trouble for worker in asked if worker.trouble)
    if not troubles:
        return none_can(kind, role)
    return f"no {kind} can be reached ({troubles}); start it, or correct its address"
