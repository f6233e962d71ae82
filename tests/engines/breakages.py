"""Runner models with one fault each, in the order of what a step does or in how block tables are kept."""

from __future__ import annotations

from typing import Any

from schedloom.conformance.mutants import runners


class SavesAtTheOtherEnd:
    """Preempted KV is saved after new blocks are zeroed where it must be before, and the other way about."""

    first = False

    def _update(self: Any, output: Any) -> None:
        save, self.handle_preemptions = self.handle_preemptions, lambda output: None
        if self.first:
            save(output)
        super()._update(output)  # type: ignore[misc]
        if not self.first:
            save(output)
        self.handle_preemptions = save


class SavesFirst(SavesAtTheOtherEnd):
    first = True


class CopiesBeforeZeroing:
    def _prepare_blocks(self: Any, output: Any) -> None:
        zeroed, copies = output.new_block_ids_to_zero, output.kv_cache_block_copies
        if copies:
            self._device.append(lambda: self.store.copy(copies))
        if zeroed:
            self._device.append(lambda: self.store.zero(zeroed))


class ComputesBeforeZeroing:
    def dispatch(self: Any, output: Any) -> Any:
        self._preparing = False
        plan = super().dispatch(output)  # type: ignore[misc]
        self._preparing = True
        self._prepare_blocks(output)
        return plan

    def _prepare_blocks(self: Any, output: Any) -> None:
        if self._preparing:
            super()._prepare_blocks(output)  # type: ignore[misc]


class AppendsInReverse:
    """Several new blocks of a request stand in its table in the wrong order."""

    def _append_blocks(self: Any, row: Any, blocks: Any) -> None:
        super()._append_blocks(row, [list(reversed(added)) for added in blocks])  # type: ignore[misc]


class ForgetsNewBlocks:
    """A request that grows keeps the table it had."""

    def _append_blocks(self: Any, row: Any, blocks: Any) -> None:
        if not any(row.num_blocks):
            super()._append_blocks(row, blocks)  # type: ignore[misc]


class SamplesEveryChunk:
    """A prompt that is not through yet samples all the same."""

    def _plan(self: Any, output: Any) -> Any:
        plan = super()._plan(output)  # type: ignore[misc]
        for name in output.num_scheduled_tokens.keys() - set(plan.sampling_ids):
            row = self.rows[name]
            plan.samples.append((row.index, row.computed + output.num_scheduled_tokens[name]))
            plan.sampling_ids.append(name)
        return plan


_BOTH = (CopiesBeforeZeroing, ComputesBeforeZeroing, AppendsInReverse, ForgetsNewBlocks, SamplesEveryChunk)

BROKEN: dict[str, dict[str, type]] = {
    "v1": {fault.__name__: fault for fault in (*_BOTH, SavesAtTheOtherEnd, runners.AppendsOnResume)},
    "v2": {fault.__name__: fault for fault in (*_BOTH, SavesFirst, runners.KeepsOldOffset)},
}
"""By the model runner that is modelled."""
