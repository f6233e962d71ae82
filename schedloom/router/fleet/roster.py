"""The names of the engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from schedloom.core.errors import ConfigurationError
from schedloom.router.settings import WorkerSettings

_KINDS = {"prefill": "prefiller", "decode": "decoder", None: "engine"}


class Roster:
    """Who is in the fleet, by the names of their own, else by role and number: the names are shown to clients,
    addresses are not.

    A name is never given to another engine, so that nothing which is known of an engine by its name is ever taken for
    another's. An engine is the same while nothing but ``drain`` changes in what is said of it.
    """

    def __init__(self, workers: Sequence[WorkerSettings] = ()) -> None:
        self.engines: dict[str, WorkerSettings] = {}
        self._given: Counter[str] = Counter()
        self._named: dict[str, WorkerSettings] = {}
        self.renew(workers)

    def renew(self, workers: Sequence[WorkerSettings]) -> None:
        """Raises ConfigurationError, and changes nothing, where a name would be given to another engine."""
        wrongs = [self._taken(one) for one in workers if one.name is not None]
        if any(wrongs):
            raise ConfigurationError(*filter(None, wrongs))
        self._named |= {one.name: one for one in workers if one.name is not None}
        names = {_identity(one): name for name, one in self.engines.items()}
        self.engines = {one.name or names.get(_identity(one)) or self._new_name(one): one for one in workers}

    def url_of(self, name: str) -> str | None:
        engine = self.engines.get(name)
        return None if engine is None else engine.url

    def name_at(self, url: str) -> str | None:
        return next((name for name, engine in self.engines.items() if engine.url == url), None)

    def _taken(self, worker: WorkerSettings) -> str | None:
        """What to say where its name is that of another engine."""
        former = self._named.get(worker.name or "")
        if former is None or _identity(former) == _identity(worker):
            return None
        moved = former.url != worker.url
        whose = f"at {former.url}" if moved else "of another role or contract there"
        return (
            f"the engine at {worker.url} cannot be named {worker.name}, which is the name of the one {whose} for as "
            f"long as the router runs; give it another name, or restart the router"
        )

    def _new_name(self, worker: WorkerSettings) -> str:
        kind = _KINDS[worker.role]
        number = self._given[kind]
        self._given[kind] += 1
        return f"{kind}-{number}"


def _identity(worker: WorkerSettings) -> str:
    return worker.model_dump_json(exclude={"drain"})
