"""The key by which engines know the router."""

from __future__ import annotations

from typing import Final

from schedloom.router.settings import RouterSettings

KEY_REFUSED: Final = (401, 403)
"""How an engine refuses a key, or that there is none."""


def engine_authorization(settings: RouterSettings) -> bytes | None:
    """The value of the header by which engines are shown it."""
    key = settings.engine_api_key
    return b"Bearer " + key.get_secret_value().encode() if key else None


def about_refused_key(engine: str, shown: bytes | None, status: int) -> str:
    """What to tell of an ``engine`` that refused what it was ``shown``."""
    what = "requests without a key" if shown is None else "the router's key"
    return f"{engine} refuses {what} (status {status}): set engine_api_key to the key that it was started with"
