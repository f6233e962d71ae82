"""Endings: telling policies of a request that has ended."""

from __future__ import annotations

from typing import Any, ClassVar

from schedloom.adapters.engine.scheduler import PolicyScheduler
from schedloom.adapters.engine.views import VllmRequestView


class EndingsPart(PolicyScheduler):
    """The hook ``request_finished``."""

    HOOKS: ClassVar = ("request_finished",)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._request_finished = self.caller("request_finished")

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any:
        self._request_finished.tell(VllmRequestView(request), self.view)
        return super()._free_request(request, delay_free_blocks)
