"""Known-bad subjects for real engines: each function breaks something in a process in which no engine runs yet."""

from __future__ import annotations

from typing import Any


def restores_one_block_too_few() -> None:
    """The last block of what is restored stays what it was."""
    from schedloom.adapters.engine.offload.copier import BlockCopier
    from schedloom.adapters.engine.offload.metadata import BlockCopies

    load = BlockCopier.load

    def loaded(copier: Any, copies: Any) -> None:
        load(copier, BlockCopies(copies.group, copies.blocks[:-1], copies.slots[:-1]))

    BlockCopier.load = loaded  # type: ignore[method-assign, assignment]


def releases_a_block_early() -> None:
    """The first block of each request goes to whoever needs one, once the request has two tokens of output."""
    from schedloom.adapters.engine.scheduler import PolicyScheduler

    update = PolicyScheduler.update_from_output

    def updated(scheduler: Any, *arguments: Any) -> Any:
        outputs = update(scheduler, *arguments)
        for request in scheduler.running:
            if request.num_output_tokens == 2 and not hasattr(request, "released"):
                request.released = True
                (kind,) = scheduler.kv_cache_manager.coordinator.single_type_managers
                blocks = kind.req_to_blocks[request.request_id]
                kind.block_pool.free_blocks(blocks[:1])
                blocks[0] = kind.block_pool.null_block
        return outputs

    PolicyScheduler.update_from_output = updated  # type: ignore[method-assign, assignment]


def never_restores() -> None:
    """Nothing is wrong with any token, but what was to be tried never happens."""
    from schedloom.adapters.engine.offload.scheduler_side import OffloadScheduler

    OffloadScheduler.take = lambda *arguments: False  # type: ignore[method-assign]
