"""The two protocols by which vLLM's schedulers tell a model runner what has become of its requests."""

from __future__ import annotations

from typing import Any

from schedloom.adapters.engine.laboratory.runner import Row, Runner


class RunnerV1(Runner):
    """Model Runner V1.

    A preempted request keeps its state and leaves the batch. It comes back among the cached requests, named in
    ``resumed_req_ids``, with its whole block table; with asynchronous scheduling its output tokens come along, because
    the host had never seen the last ones. Preemptions are handled before new blocks are zeroed.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._batch: set[str] = set()

    def _update(self, output: Any) -> None:
        self.handle_preemptions(output)
        for request_id in output.finished_req_ids:
            self._retire(request_id)
        self._prepare_blocks(output)
        cached = output.scheduled_cached_reqs
        self._batch = self._batch & (output.num_scheduled_tokens.keys() - cached.resumed_req_ids)
        for new in output.scheduled_new_reqs:
            row = self._new_row(new.req_id, len(new.prompt_token_ids), new.prompt_token_ids)
            row.computed = new.num_computed_tokens
            self._set_blocks(row, new.block_ids)
        for place, request_id in enumerate(cached.req_ids):
            self._update_cached(request_id, place, cached)
        self._batch = set(output.num_scheduled_tokens)

    def _update_cached(self, request_id: str, place: int, cached: Any) -> None:
        blocks = cached.new_block_ids[place]
        row = self.rows[request_id]
        if request_id not in self._batch:
            row = self._rejoin(request_id, row, cached.num_output_tokens[place], cached)
        if request_id in cached.resumed_req_ids:
            self._set_blocks(row, blocks)
        elif blocks is not None:
            self._append_blocks(row, blocks)
        row.computed = cached.num_computed_tokens[place]

    def _rejoin(self, request_id: str, old: Row, num_output_tokens: int, cached: Any) -> Row:
        """Put a request that was left out of the last step into the batch again, as a row of its own."""
        length = min(old.length, old.num_prompt_tokens + num_output_tokens)
        tokens = self._tokens[old.index, :length].tolist()
        if self.asynchronous and num_output_tokens:
            tokens[old.num_prompt_tokens :] = cached.all_token_ids[request_id][-num_output_tokens:]
        table = self._blocks_of(old)
        self._retire(request_id)
        row = self._new_row(request_id, old.num_prompt_tokens, tokens)
        self._set_blocks(row, table)
        return row


class RunnerV2(Runner):
    """Model Runner V2.

    A preempted request is forgotten at once, and comes back as a new one whose ``prefill_token_ids`` hold all of its
    tokens. New blocks are zeroed before preemptions are handled.
    """

    def _update(self, output: Any) -> None:
        for request_id in output.finished_req_ids.union(output.preempted_req_ids or ()):
            self._retire(request_id)
        for new in output.scheduled_new_reqs:
            self._retire(new.req_id)
            row = self._new_row(new.req_id, len(new.prompt_token_ids), new.prefill_token_ids)
            row.computed = new.num_computed_tokens
            self._set_blocks(row, new.block_ids)
        cached = output.scheduled_cached_reqs
        for place, request_id in enumerate(cached.req_ids):
            row = self.rows[request_id]
            row.computed = cached.num_computed_tokens[place]
            if cached.new_block_ids[place] is not None:
                self._append_blocks(row, cached.new_block_ids[place])
        self._prepare_blocks(output)
        self.handle_preemptions(output)
