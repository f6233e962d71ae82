"""Addresses in a router's configuration: what they may be, and how they are shown."""

from __future__ import annotations

import re
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, PlainSerializer

VISIBLE = re.compile(r"[\x21-\x7e]+").fullmatch
"""Whether all of a string is of visible ASCII characters."""

_MASK: Final = "**********"
_BEFORE_HOST = re.compile(r"(://(?:[^:@/]*:)?).*@")
_IN_QUERY = re.compile(r"([?&][^=&]*(?:pass|key|secret|token)[^=&]*=)[^&]*", re.IGNORECASE)


def masked(url: str) -> str:
    """``url`` without what it may hold of passwords."""
    return _IN_QUERY.sub(rf"\1{_MASK}", _BEFORE_HOST.sub(rf"\1{_MASK}@", url))


def reached_by(url: str) -> tuple[str | None, int, str]:
    """The host, the port and the path, however ``url`` is written."""
    parts = urlsplit(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), parts.path


def _checked_engine(url: str) -> str:
    if not _has_usable_port(url):
        raise ValueError(f"{masked(url)!r} has no usable port, 1 to 65535; write it as http://host:port")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not VISIBLE(url):
        raise ValueError(f"{masked(url)!r} is not an engine's address; write it as http://host:port")
    if parts.query or parts.fragment or parts.username:
        raise ValueError(f"{masked(url)!r} carries more than an address; write it as http://host:port")
    return _checked_base(url.rstrip("/"))


def _checked_base(url: str) -> str:
    """What clients are told to call is not what the paths of an engine are added to."""
    if urlsplit(url).path.endswith("/v1"):
        raise ValueError(f"{masked(url)!r} is where clients of an engine begin; leave out /v1: {url[:-3].rstrip('/')}")
    return url


def _has_usable_port(url: str) -> bool:
    try:
        _ = urlsplit(url).port
    except ValueError:
        return False
    return True


def _checked_store(url: str) -> str:
    if not url.startswith(("redis://", "rediss://", "unix://")) or not _has_usable_port(url):
        raise ValueError("it is not the address of a Valkey or Redis server; write it as redis://host:port/database")
    return url


def _checked_collector(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{masked(url)!r} is not the address of a collector; write it as http://host:4318/v1/traces")
    return url


EngineUrl = Annotated[str, AfterValidator(_checked_engine)]
StoreUrl = Annotated[str, AfterValidator(_checked_store), PlainSerializer(masked)]
CollectorUrl = Annotated[str, AfterValidator(_checked_collector), PlainSerializer(masked)]
