"""Who may use the router, and what keeps its users apart."""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from schedloom.router.failures import Failure
from schedloom.router.settings import ApiKeySettings, RouterSettings

_PREFIX = b"bearer "
_NO_KEY = "An API key is needed: send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'."


@dataclass(frozen=True, slots=True)
class Tenant:
    """One user of the router.

    ``salt`` goes into the engines' prefix cache, so that nobody can find out by timing what another has
    asked; ``None`` shares the cache. ``scope`` makes session ids unguessable for others; ``None`` leaves them
    as they are.
    """

    name: str
    salt: str | None = None
    scope: bytes | None = None

    def session(self, session: str) -> str:
        """The session id as engines see it."""
        if self.scope is None:
            return session
        digest = _keyed(self.scope).copy()
        digest.update(session.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


@functools.lru_cache(maxsize=1024)
def _keyed(scope: bytes) -> hashlib.blake2b:
    """A digest that has read its key."""
    return hashlib.blake2b(digest_size=32, key=scope)


EVERYBODY = Tenant("")
"""The tenant of all clients while there are no API keys."""


class Tenants:
    """Knows tenants by their API keys. Keys are kept as digests, and compared as such."""

    def __init__(self, settings: RouterSettings) -> None:
        secret = settings.secret.get_secret_value().encode() if settings.secret else secrets.token_bytes(32)
        self._secret = secret
        self._share = settings.share_prefix_across_tenants
        self._known = self._read(settings.api_keys)

    def of(self, authorization: bytes | None) -> Tenant:
        """Raises Failure (401) for a missing or unknown key."""
        if not self._known:
            return EVERYBODY
        if authorization is None or authorization[: len(_PREFIX)].lower() != _PREFIX:
            raise Failure.own(401, _NO_KEY, "no_api_key")
        tenant = self._known.get(_digest(authorization[len(_PREFIX) :].strip()))
        if tenant is None:
            raise Failure.own(401, "The API key is not known.", "unknown_api_key")
        return tenant

    def _read(self, keys: Sequence[ApiKeySettings]) -> dict[bytes, Tenant]:
        return {_digest(key.key.get_secret_value().encode()): self._tenant(key.tenant) for key in keys}

    def _tenant(self, name: str) -> Tenant:
        salt = None if self._share else self._derive(b"salt", name).hex()
        return Tenant(name, salt, self._derive(b"session", name))

    def _derive(self, purpose: bytes, name: str) -> bytes:
        return hmac.new(self._secret, purpose + b"\0" + name.encode(), hashlib.sha256).digest()


def _digest(key: bytes) -> bytes:
    """A table of digests is looked up in a time that tells nothing of the keys."""
    return hashlib.blake2b(key).digest()
