"""The router as a process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
import uvloop

from schedloom.core.errors import ConfigurationError
from schedloom.router.app import RouterApp
from schedloom.router.protocol import LimitedProtocol
from schedloom.router.sessions import SessionStore
from schedloom.router.settings import RouterSettings

_BACKLOG = 4096


def run(settings: RouterSettings) -> None:
    """Serve until SIGTERM or SIGINT; requests under way may then finish within ``shutdown_grace_seconds``.

    Raises ConfigurationError when the router cannot start as configured.
    """
    uvloop.run(_serve(settings))


async def _serve(settings: RouterSettings) -> None:
    listener = listen(settings.host, settings.port)
    address = address_of(settings.host, listener)
    await serve(settings, RouterApp(settings, sessions=open_store(settings)), listener, lambda: announce(address))


async def serve(settings: RouterSettings, app: RouterApp, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve ``app`` on ``listener``, which listens once the engines are known, until SIGTERM or SIGINT.

    ``ready`` is called when it begins. Raises ConfigurationError when the router cannot start as configured.
    """
    try:
        await app.start()
        listener.listen(_BACKLOG)
        config = uvicorn.Config(
            app,
            http=protocol_of(settings, app),
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_seconds)),
        )
        await Server(config, app, ready).serve(sockets=[listener])
    finally:
        listener.close()
        await app.close()


def open_store(settings: RouterSettings) -> SessionStore | None:
    """Where sessions are kept outside this process, if anywhere."""
    if settings.session_store is None:
        return None
    from schedloom.router.redis_sessions import RedisSessions

    urls = [worker.url for worker in settings.workers]
    return RedisSessions(settings.session_store, urls, settings.session_idle_seconds)


def protocol_of(settings: RouterSettings, app: RouterApp) -> type[LimitedProtocol]:
    limits = {
        "max_header_bytes": settings.max_header_bytes,
        "header_seconds": settings.header_timeout_seconds,
        "body_seconds": settings.body_timeout_seconds,
        "may_come": staticmethod(app.door.gate.may_come),
        "on_refused": staticmethod(lambda: app.metrics.ended("", "failed")),
    }
    return type("Protocol", (LimitedProtocol,), limits)


class Server(uvicorn.Server):
    """Says when it is ready, and ends by returning."""

    def __init__(self, config: uvicorn.Config, app: RouterApp, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._app = app
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.drain()
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def announce(address: str) -> None:
    print(f"schedloom router is ready on {address}", flush=True)


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket. Raises ConfigurationError when the address cannot be had."""
    listener = bind(host, port, shared=shared)
    listener.listen(_BACKLOG)
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


def configure_logging(level: str = "INFO") -> None:
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
