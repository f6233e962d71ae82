"""Where copies run: at once on a CPU, on a stream of their own beside an accelerator's computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Done = Callable[[], bool]


class Lane(Protocol):
    """Runs work in the order in which it is submitted, after everything the device was given before."""

    def submit(self, work: Callable[[], None]) -> Done:
        """Submit ``work``. The answer tells, whenever it is called, whether it is done."""
        ...


class DirectLane:
    """A CPU has computed everything that it was given before."""

    def submit(self, work: Callable[[], None]) -> Done:
        work()
        return lambda: True


class StreamLane:
    """A stream of any accelerator that torch knows."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream = torch.Stream(device=device)

    def submit(self, work: Callable[[], None]) -> Done:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            work()
        done: Done = self._stream.record_event().query
        return done


def lane_beside(device: Any) -> Lane:
    return DirectLane() if device.type == "cpu" else StreamLane(device)
