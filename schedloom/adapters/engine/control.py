"""How an engine is watched and steered while it runs, across its processes.

The server process and the engine processes that it starts share a folder, named by an environment variable that the
first of them sets. Each engine process writes what it decided there, and reads from there which policies are switched;
the server shows the one on ``/metrics`` and writes the other for ``PUT /schedloom/policies/NAME``. A signal to any of
them switches every policy.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path

import orjson

from schedloom.adapters.engine.hooks import HookCaller
from schedloom.adapters.engine.trace import DecisionTrace

logger = logging.getLogger("vllm.schedloom")

FOLDER_VARIABLE = "SCHEDLOOM_RUN_FOLDER"
POLL_SECONDS = 0.5
SWITCHES = "switches.json"
EVERY = "*"
"""Stands among the switches for every policy that is not named there."""

EPOCH = "epoch"

Count = tuple[str, str, str, str, int]


class Mode(str, Enum):
    """How a policy takes part: it acts; it decides and is counted, and nothing is done; it is not asked."""

    ON = "on"
    SHADOW = "shadow"
    OFF = "off"


def epoch(folder: Path | None = None) -> str:
    """The name of this life of the server, the same in all its processes."""
    path = (folder or run_folder()) / EPOCH
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(uuid.uuid4().hex)
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
    return path.read_text()


def run_folder() -> Path:
    """The folder of this server and its engine processes; made, and removed at its end, by the first that asks."""
    if FOLDER_VARIABLE not in os.environ:
        folder = tempfile.mkdtemp(prefix="schedloom-")
        os.environ[FOLDER_VARIABLE] = folder
        atexit.register(_remove_in, os.getpid(), folder)
    return Path(os.environ[FOLDER_VARIABLE])


def _remove_in(process: int, folder: str) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def switch(policy: str, mode: Mode, folder: Path | None = None) -> None:
    """Switch ``policy`` in every engine process of this server: within ``POLL_SECONDS``, before it schedules again."""
    folder = folder or run_folder()
    with _alone(folder):
        _write(folder / SWITCHES, {**switches(folder), policy: mode.value})


def switch_all(mode: Mode | None, folder: Path | None = None) -> None:
    """Switch every policy, whatever was switched before; with ``None`` all are as they were configured."""
    folder = folder or run_folder()
    with _alone(folder):
        _write(folder / SWITCHES, {} if mode is None else {EVERY: mode.value})


def modes_of(policies: Iterable[str], folder: Path | None = None) -> dict[str, str]:
    """How ``policies`` take part now."""
    switched = switches(folder)
    return {policy: switched.get(policy, switched.get(EVERY, Mode.ON.value)) for policy in policies}


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One server at a time: what another switches in between would be lost."""
    with (folder / "switches.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def switches(folder: Path | None = None) -> dict[str, str]:
    """The modes that were switched, by policy."""
    try:
        modes: dict[str, str] = orjson.loads(((folder or run_folder()) / SWITCHES).read_bytes())
    except FileNotFoundError:
        return {}
    return modes


def published_counts(folder: Path | None = None) -> list[Count]:
    """Decisions of all engine processes together: policy, hook, decision, reason, count."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for file in (folder or run_folder()).glob("decisions-*.json"):
        with contextlib.suppress(FileNotFoundError):
            counts.update({tuple(key): count for *key, count in orjson.loads(file.read_bytes())})
    return [(*key, count) for key, count in sorted(counts.items())]


def _write(path: Path, content: object) -> None:
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_bytes(orjson.dumps(content))
    draft.rename(path)


class Control:
    """One engine process's end."""

    def __init__(self, trace: DecisionTrace, callers: Iterable[HookCaller]) -> None:
        self._trace = trace
        self._callers = callers
        self._folder = run_folder()
        self._next = 0.0
        self._seen: object = None
        self._published = 0
        self._complained = False

    def begin_step(self) -> None:
        """Take up switches, if it is time: always so after a rest."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + POLL_SECONDS
            self._try(self._take_up_switches)
            self._try(self._publish)

    def rest(self) -> None:
        """Publish what a step that comes late would publish late."""
        self._try(self._publish)

    def _try(self, part: Callable[[], None]) -> None:
        """A full disk, a folder that was tidied away, or a file in it that somebody else wrote, is no reason to stop
        serving; said once."""
        try:
            part()
        except Exception:
            if not self._complained:
                self._complained = True
                logger.exception("switches and counters cannot be exchanged in %s; the engine goes on", self._folder)

    def _take_up_switches(self) -> None:
        try:
            status = (self._folder / SWITCHES).stat()
        except FileNotFoundError:
            return
        version = (status.st_mtime_ns, status.st_ino)
        if version != self._seen:
            self._seen = version
            modes = switches(self._folder)
            for caller in self._callers:
                caller.set_modes(modes, modes.get(EVERY, Mode.ON.value))

    def _publish(self) -> None:
        counts = [*self._trace.counts.items()]
        counts += [(key, count) for caller in self._callers for key, count in caller.counts.items()]
        total = sum(count for _, count in counts)
        if total != self._published:
            self._published = total
            _write(self._folder / f"decisions-{os.getpid()}.json", [[*key, count] for key, count in counts])
