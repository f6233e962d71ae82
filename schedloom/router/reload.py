"""The configuration read again while the router runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from schedloom.core.errors import ConfigurationError
from schedloom.router.declared import refusals
from schedloom.router.fleet.roster import Roster
from schedloom.router.hangup import hangups
from schedloom.router.settings import RouterSettings
from schedloom.router.tasks import stopped

log = logging.getLogger(__name__)

Again = Callable[[], RouterSettings]
"""Reads the configuration. Raises ConfigurationError for one that cannot be used."""


class Reloading:
    """Reads the configuration again when it is asked to, renews ``roster`` by the engines that it names then, and has
    ``use`` follow.

    All or nothing: what cannot be used, or cannot change while the router runs, changes nothing and is told in the log.
    """

    def __init__(self, settings: RouterSettings, again: Again, roster: Roster, use: Callable[[], None]) -> None:
        self._settings = settings
        self._again = again
        self._roster = roster
        self._use = use
        self._asked = asyncio.Event()

    @contextlib.asynccontextmanager
    async def on_hangup(self) -> AsyncIterator[None]:
        """SIGHUP asks, and has asked if it came before."""
        loop = asyncio.get_running_loop()
        reading = loop.create_task(self._keep_reading())
        with hangups.heard_by(lambda: loop.call_soon_threadsafe(self._asked.set)):
            try:
                yield
            finally:
                await stopped(reading)

    async def _keep_reading(self) -> None:
        while await self._asked.wait():
            self._asked.clear()
            await self.reload()

    async def reload(self) -> None:
        try:
            settings = await asyncio.to_thread(self._again)
            refuse_changes(self._settings, settings)
            self._roster.renew(settings.workers)
        except ConfigurationError as error:
            for sentence in error.sentences:
                log.error("nothing changes: %s", sentence)
            return
        except Exception:
            log.exception("nothing changes: the configuration cannot be read")
            return
        log.info("the engines are read anew" if settings != self._settings else "the configuration is the same")
        self._settings = settings
        self._use()


def refuse_changes(old: RouterSettings, new: RouterSettings) -> None:
    """Raises ConfigurationError for all that differs but the engines, and for engines that a start would refuse."""
    keys = RouterSettings.model_fields.keys() - {"workers"}
    fixed = sorted(key for key in keys if getattr(old, key) != getattr(new, key))
    if fixed:
        raise ConfigurationError(
            f"{', '.join(fixed)} cannot change while the router runs, only workers can; restart it, or take that back"
        )
    if wrongs := refusals(new):
        raise ConfigurationError(*wrongs)
