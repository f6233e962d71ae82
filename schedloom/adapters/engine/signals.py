"""Every policy of an engine switched at once, by a signal to any of its processes.

SIGUSR1 switches all off: vLLM's own behaviour, within half a second. SIGUSR2 puts back what was configured.
"""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

from schedloom.adapters.engine.control import Mode, switch_all

logger = logging.getLogger("vllm.schedloom")

_MODES: dict[int, Mode | None] = {signal.SIGUSR1: Mode.OFF, signal.SIGUSR2: None}


def install() -> None:
    """Does nothing outside of the main thread, where Python takes no handlers, and for a signal that is taken."""
    if threading.current_thread() is threading.main_thread():
        for number in _MODES:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _switch)


def _switch(number: int, frame: Any) -> None:
    """In a thread of its own: what the signal interrupts may be switching, and would never be done."""
    threading.Thread(target=_switch_all, args=(_MODES[number],)).start()


def _switch_all(mode: Mode | None) -> None:
    try:
        switch_all(mode)
        logger.warning("every policy is %s, by a signal", "as it was configured" if mode is None else "off")
    except OSError:
        logger.exception("no policy could be switched by a signal")
