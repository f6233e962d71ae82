"""The connector in a worker: does what the scheduler side orders, and reports it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from schedloom.adapters.engine.offload.copier import BlockCopier, caches_by_block
from schedloom.adapters.engine.offload.lanes import Done, Lane, lane_beside
from schedloom.adapters.engine.offload.metadata import BlockCopies, Job, SaveReport

logger = logging.getLogger("vllm.schedloom")


class OffloadWorker:
    """All copies go through one lane in the order of their jobs.

    The scheduler side relies on that order: it gives the slots of a save that nobody wants any more to another one,
    whose copy then overwrites them.
    """

    def __init__(self, kv_cache_config: Any, num_slots: int, make_lane: Callable[[Any], Lane] = lane_beside) -> None:
        self._config = kv_cache_config
        self._num_slots = num_slots
        self.make_lane = make_lane
        self._last_save = self._last_load = 0
        self._saving: dict[int, Done] = {}
        self._loading: dict[str, Done] = {}
        self._failed_saves: set[int] = set()
        self._failed_loads: set[str] = set()

    def register(self, caches: Mapping[str, Any]) -> None:
        num_blocks = self._config.num_blocks
        groups = [caches_by_block(caches, group.layer_names, num_blocks) for group in self._config.kv_cache_groups]
        self._copier = BlockCopier(groups, self._num_slots)
        self._lane = self.make_lane(self._copier.device)

    def save(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.number > self._last_save:
                self._last_save = job.number
                self._saving[job.number] = self._submit(job, self._copier.save) or self._fail_save(job)

    def load(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.number > self._last_load:
                self._last_load = job.number
                self._loading[job.request_id] = self._submit(job, self._copier.load) or self._fail_load(job)

    def take_report(self) -> SaveReport | None:
        """The saves that are done since this was last called."""
        done = [number for number, is_done in self._saving.items() if is_done()]
        for number in done:
            del self._saving[number]
        failed, self._failed_saves = self._failed_saves, set()
        return SaveReport(dict.fromkeys(done, 1), failed) if done else None

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """The requests whose loads are over since this was last called, and those among them that failed."""
        over = {request_id for request_id, is_done in self._loading.items() if is_done()}
        for request_id in over:
            del self._loading[request_id]
        failed, self._failed_loads = self._failed_loads, set()
        return over, failed

    def _submit(self, job: Job, copy: Callable[[BlockCopies], None]) -> Done | None:
        """None when it fails on the spot, as it does where no more host memory can be had."""
        try:
            return self._lane.submit(partial(_each, copy, job.copies))
        except Exception:
            logger.exception("the KV of preempted request %s could not be copied", job.request_id)
            return None

    def _fail_save(self, job: Job) -> Done:
        self._failed_saves.add(job.number)
        return lambda: True

    def _fail_load(self, job: Job) -> Done:
        self._failed_loads.add(job.request_id)
        return lambda: True


def _each(copy: Callable[[BlockCopies], None], copies: list[BlockCopies]) -> None:
    for group in copies:
        copy(group)
