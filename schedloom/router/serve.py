"""The router as a process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvloop

from schedloom.core.errors import ConfigurationError
from schedloom.router.app import RouterApp
from schedloom.router.fleet.checks import doubt
from schedloom.router.fleet.roster import Roster
from schedloom.router.http.clients import Limits
from schedloom.router.http.server import BACKLOG, Server
from schedloom.router.logs import common, counted, whole
from schedloom.router.reload import Again, Reloading
from schedloom.router.sessions.store import SessionKey, SessionStore
from schedloom.router.settings import RouterSettings

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def run(settings: RouterSettings, again: Again) -> None:
    """Serve until SIGTERM or SIGINT; requests under way may then finish within ``shutdown_grace_seconds``. SIGHUP has
    the engines read ``again``.

    Raises ConfigurationError when the router cannot start as configured.
    """
    uvloop.run(_serve(settings, again))


async def _serve(settings: RouterSettings, again: Again) -> None:
    roster = Roster(settings.workers)
    listener = listen(settings.host, settings.port)
    address = address_of(settings.host, listener)
    app = RouterApp(settings, sessions=open_store(settings, roster), roster=roster)
    async with Reloading(settings, again, roster, app.renew).on_hangup():
        await serve(settings, app, listener, lambda: announce(address))


async def serve(
    settings: RouterSettings,
    app: RouterApp,
    listener: socket.socket,
    ready: Callable[[], None],
    *,
    is_first: bool = True,
) -> None:
    """Serve ``app`` on ``listener`` from when the engines are known until SIGTERM or SIGINT.

    ``ready`` is called when it begins. ``is_first`` is false where other processes serve already. Raises
    ConfigurationError when the router cannot start as configured.
    """
    try:
        await app.start(is_first=is_first)
        await tell_doubts(settings, app)
        _spare_the_collector()
        _keep_freed_memory()
        server = Server(app, limits_of(settings, app))
        with told_to_stop(app) as stopping:
            await server.start(listener)
            ready()
            await stopping.wait()
            await _end(server, settings.shutdown_grace_seconds)
    finally:
        listener.close()
        await app.close()
    whole.info("the router has ended")


async def _end(server: Server, seconds: float) -> None:
    whole.info("the router ends, within %g s", seconds)
    if server.under_way:
        log.info("%s may still finish", counted(server.under_way, "request"))
    if cut_off := await server.stop(seconds):
        log.warning("%s did not finish in time: cut off", counted(cut_off, "request"))


async def tell_doubts(settings: RouterSettings, app: RouterApp) -> None:
    """Log what may go wrong though the router can start."""
    for worker in app.fleet.workers:
        told = doubt((worker, worker.contract), settings) if worker.known else None
        if told:
            common.warning(told)
    if settings.session_store is not None:
        await app.sessions.owner(SessionKey("", "", ""))  # a store that fails is told of by the first to ask it


def open_store(settings: RouterSettings, roster: Roster) -> SessionStore | None:
    """Where sessions are kept outside this process, if anywhere."""
    if settings.session_store is None:
        return None
    from schedloom.router.sessions.redis import RedisSessions

    return RedisSessions(settings.session_store, roster, settings.session_idle_seconds)


def _spare_the_collector() -> None:
    """What is there by now stays, and requests leave no cycles: looking for some is seldom worth while."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)


def _files() -> int:
    """How many files this process may have open, as many as it can get: half is for clients, the rest for engines."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else files


def _keep_freed_memory() -> None:
    """glibc hands every body's memory back to the kernel, which takes longer to give it again than to copy it."""
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_M_TRIM_THRESHOLD, 16 * 2**20)
        tune(_M_MMAP_THRESHOLD, 4 * 2**20)


def limits_of(settings: RouterSettings, app: RouterApp) -> Limits:
    return Limits(
        settings.max_header_bytes,
        settings.header_timeout_seconds,
        settings.body_timeout_seconds,
        may_come=app.door.gate.may_come,
        arrivals=app.arrivals,
        most_connections=_files() // 2,
        on_refused=lambda: app.metrics.ended("", "shed"),
    )


@contextlib.contextmanager
def told_to_stop(app: RouterApp) -> Iterator[asyncio.Event]:
    """An event that SIGTERM or SIGINT sets, after which ``app`` takes nothing new."""
    stopping = asyncio.Event()

    def stop() -> None:
        app.drain()
        stopping.set()

    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield stopping
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def announce(address: str) -> None:
    with contextlib.suppress(OSError):  # its terminal may be gone by now
        print(f"schedloom router is ready on {address}", flush=True)


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket. Raises ConfigurationError when the address cannot be had."""
    listener = bind(host, port, shared=shared)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket at an address, which other processes may have too where it is ``shared``. Raises ConfigurationError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        one.bind((host, port))
    except OSError as error:
        one.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} of {host} is in use; stop what listens there, or choose another --port"
            ) from error
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return one


def address_of(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"
