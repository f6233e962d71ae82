"""Runs one command for as long as the process that started it lives: `python keeper.py CORES COMMAND...`.

CORES is a comma-separated list of processor cores, or empty for any. The parent holds the other end of standard
input: when that closes, whatever closed it, the command and everything it started are ended. This file is run as
a script and imports only the standard library.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 5.0


def main(cores: str, command: list[str]) -> int:
    """Returns the command's exit status, or 128 plus the number of the signal that ended it."""
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _end(child.pid))
    threading.Thread(target=_end_with_parent, args=(child.pid,), daemon=True).start()
    # Not reaped yet, so its process group still cannot be anybody else's when what it left behind is killed.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    _signal_group(child.pid, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _end_with_parent(group: int) -> None:
    while os.read(0, 4096):
        pass
    _end(group)


def _end(group: int) -> None:
    _signal_group(group, signal.SIGTERM)
    killer = threading.Timer(GRACE_SECONDS, _signal_group, (group, signal.SIGKILL))
    killer.daemon = True
    killer.start()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
