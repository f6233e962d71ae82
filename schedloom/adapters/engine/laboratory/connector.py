"""P/D connectors in pull and push form, over the laboratory's fabric instead of a network.

They keep to vLLM's connector interface on both sides, so that they also stand inside vLLM's own ``MultiConnector``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from schedloom.adapters.engine.laboratory.fabric import Fabric, Transfer


@dataclass
class Begun(KVConnectorMetadata):
    """The transfers that a step begins."""

    transfers: list[Transfer] = field(default_factory=list)


class PullConnector(KVConnectorBase_V1, SupportsHMA):
    """A Decoder pulls the prompt's KV; a Prefiller holds its blocks until they were pulled."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        number = vllm_config.kv_transfer_config.get_from_extra_config("fabric", None)
        self._fabric = Fabric.numbered(number)
        self._asked: set[str] = set()
        self._begun: list[Transfer] = []

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        parameters = request.kv_transfer_params or {}
        if not parameters.get("do_remote_prefill") or request.request_id in self._asked:
            return 0, False
        count = self._end_of(request) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens <= 0:
            return
        self._asked.add(request.request_id)
        end = self._end_of(request)
        start = end - num_external_tokens
        self._begun.append(Transfer(request.request_id, blocks.get_block_ids(), start, end, sending=False))

    def _end_of(self, request: Any) -> int:
        end: int = request.num_prompt_tokens - self._fabric.withheld
        return end

    def build_connector_meta(self, scheduler_output: Any) -> Begun:
        begun, self._begun = self._begun, []
        return Begun(begun)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._asked.discard(request.request_id)
        parameters = request.kv_transfer_params or {}
        if not parameters.get("do_remote_decode") or request.status != RequestStatus.FINISHED_LENGTH_CAPPED:
            return False, None
        self._begun.append(Transfer(request.request_id, block_ids, 0, request.num_prompt_tokens, sending=True))
        return True, {"do_remote_prefill": True, "remote_block_ids": block_ids}

    # Worker side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for transfer in self._get_connector_metadata().transfers:
            self._fabric.begin(transfer)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        raise NotImplementedError("vLLM asks for all results together")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(*self._fabric.take_finished())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._fabric.take_lost_blocks()


class PushConnector(PullConnector):
    """A Prefiller writes the prompt's KV to where a Decoder told it to. Until that is done the engine makes steps, be
    there requests or none."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._unwritten: set[str] = set()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        held, parameters = super().request_finished_all_groups(request, block_ids)
        if held:
            self._unwritten.add(request.request_id)
        return held, parameters

    def has_pending_push_work(self) -> bool:
        return bool(self._unwritten or self._begun)

    def update_connector_output(self, connector_output: Any) -> None:
        self._unwritten.difference_update(connector_output.finished_sending or ())


class IdleConnector(PullConnector):
    """A second connector beside the first: it is asked everything and never has anything."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()
