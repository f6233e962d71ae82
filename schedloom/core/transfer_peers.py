"""Which engines' KV connectors an engine may be sent to by a request's transfer parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator

_ADDRESSES = ("metaserver", "remote_bootstrap_addr")
"""Parameters that hold a whole address."""

_LAST_PORT = 65535


def _checked(peer: str) -> str:
    host, port = _split(peer)
    _, colon, number = peer.rpartition(":")
    if colon and not host and number.isdecimal() and int(number) > _LAST_PORT:
        raise ValueError(f"{peer!r} has port {number}, and ports end at {_LAST_PORT}")
    if not host or "/" in peer or (port is None and peer != host):
        raise ValueError(f"{peer!r} is not a peer; write it as host:port, or as host for every port of it")
    return peer


TransferPeer = Annotated[str, AfterValidator(_checked)]


def stranger_in(parameters: Any, peers: Collection[str]) -> str | None:
    """The first address in ``parameters``, a request's ``kv_transfer_params``, that is not one of ``peers``.

    A peer is ``host:port``, or ``host`` for every port of it.
    """
    if not isinstance(parameters, dict):
        return None
    return next((address for address in _addresses(parameters) if not _is_known(address, peers)), None)


def _addresses(parameters: dict[str, Any]) -> Iterator[str]:
    host = parameters.get("remote_host")
    if host is not None:
        yield _joined(str(host), parameters.get("remote_port"))
    yield from (str(parameters[key]) for key in _ADDRESSES if parameters.get(key) is not None)


def _joined(host: str, port: object) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_known(address: str, peers: Collection[str]) -> bool:
    host, port = _split(address)
    return any(host == known and limit in (None, port) for known, limit in map(_split, peers))


def _split(address: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        return parts.hostname or "", parts.port
    except ValueError:
        return "", None
