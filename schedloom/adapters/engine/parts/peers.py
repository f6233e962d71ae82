"""Peers: letting the data-parallel ranks of one host know of each other's load."""

from __future__ import annotations

import logging
from typing import Any

from schedloom.adapters.engine.peers import open_board
from schedloom.adapters.engine.scheduler import PolicyScheduler
from schedloom.core.composition import PolicySet

logger = logging.getLogger("vllm.schedloom")


class PeersPart(PolicyScheduler):
    """Publishes this rank's load when a step is over, and shows the others' in ``view.peers``."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        try:
            self.view.board = open_board(self.parallel_config)
        except OSError as error:
            logger.warning("the load of the data-parallel peers stays unknown: %s", error)

    @classmethod
    def serves(cls, policies: PolicySet) -> bool:
        return any(policy.reads_peers for policy in policies.policies)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.view.board is not None:
            running, waiting = self.get_request_counts()
            self.view.board.publish(running, waiting, self.max_num_active_reqs, self.kv_cache_manager.usage)
        return outputs

    def shutdown(self) -> None:
        board, self.view.board = self.view.board, None
        if board is not None:
            board.close()
        super().shutdown()
