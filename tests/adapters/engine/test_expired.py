"""R6: KV that its Prefiller may keep no more is not pulled, by vLLM's own classes of a Decoder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from schedloom.adapters.engine import expired

LEASE = 30
PROMPT = 300
STOOD_STILL = LEASE / 2 + 1


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Request:
    """What the connector asks of vLLM's."""

    def __init__(self, name: str, arrival: float, **more: Any) -> None:
        self.request_id, self.arrival_time, self.status = name, arrival, "aborted"
        self.prompt_token_ids = list(range(PROMPT))
        self.num_prompt_tokens = PROMPT
        self.kv_transfer_params: dict[str, Any] = {
            "do_remote_prefill": True,
            "remote_block_ids": ([1, 2, 3],),
            "remote_engine_id": "prefiller",
            "remote_request_id": f"prefill of {name}",
            "remote_host": "host",
            "remote_port": 1,
            "tp_size": 1,
            **more,
        }


class Decoder:
    """The scheduler's side of a Decoder's connector, asked as vLLM's scheduler does."""

    def __init__(self, clock: Clock, in_company: bool = False, **extra: Any) -> None:
        transfer = KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role="kv_consumer",
            kv_connector_extra_config={"kv_lease_duration": LEASE, **extra},
        )
        self.clock = clock
        (load_in_company if in_company else KVConnectorFactory.get_connector_class)(transfer)
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1, decode_context_parallel_size=1, data_parallel_index=0
            ),
            cache_config=SimpleNamespace(block_size=32, mamba_cache_mode="none"),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            kv_transfer_config=transfer,
            num_prefill_lookahead_tokens=0,
        )
        cache: Any = SimpleNamespace(
            transfer_groups=[],
            kv_cache_groups=[],
            has_mamba_layers=False,
            select_transfer_block_ids=lambda blocks: blocks,
        )
        self.side: Any = NixlPullConnectorScheduler(config, "decoder", cache)

    def receives(self, name: str = "r", arrived: float | None = None, **more: Any) -> Request:
        request = Request(name, self.clock.now if arrived is None else arrived, **more)
        self.side.on_new_request(request)
        return request

    def step(self) -> Any:
        return self.side.build_connector_meta(None)

    def wait(self, seconds: int) -> None:
        """A step each second."""
        for _ in range(seconds):
            self.step()
            self.clock.now += 1

    def looks(self, request: Request, here: int = 0) -> Any:
        return self.side.get_num_new_matched_tokens(request, here)

    def admits(self, request: Request, tokens: int) -> Any:
        """Its part in the next step."""
        blocks: Any = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ([7, 8, 9],), blocks=())
        self.side.update_state_after_alloc(request, blocks, tokens)
        return self.step().reqs_to_recv.get(request.request_id)

    def pulls(self, request: Request) -> bool:
        return bool(self.looks(request) == (PROMPT, True))


def load_in_company(transfer: KVTransferConfig) -> None:
    """As one of the connectors of a ``MultiConnector``."""
    own = {name: getattr(transfer, name) for name in ("kv_connector", "kv_role", "kv_connector_extra_config")}
    several = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_consumer", kv_connector_extra_config={"connectors": [own]}
    )
    company: Any = KVConnectorFactory.get_connector_class(several)
    company._get_connector_classes_and_configs(SimpleNamespace(kv_transfer_config=several))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Of a process that has the plug-in; vLLM times its heartbeats by the same."""
    with monkeypatch.context() as patched:
        patched.setattr(KVConnectorFactory, "get_connector_class", KVConnectorFactory.get_connector_class)
        for owner, names in (
            (NixlPullConnectorScheduler, expired._SCHEDULER_SEAMS),
            (NixlPullConnectorWorker, expired._WORKER_SEAMS),
        ):
            for name in names:
                patched.setattr(owner, name, getattr(owner, name))
        patched.setattr(NixlPullConnectorScheduler, expired.MARK, True, raising=False)
        patched.delattr(NixlPullConnectorScheduler, expired.MARK)
        patched.setattr(expired, "clock", clock := Clock())
        patched.setattr(base_scheduler, "time", SimpleNamespace(perf_counter=clock))
        expired.install()
        expired.install()
        yield clock


@pytest.fixture
def decoder(clock: Clock) -> Decoder:
    return Decoder(clock)


def test_kv_of_a_healthy_decoder_is_pulled_however_long_it_waits(decoder: Decoder) -> None:
    at_once, later = decoder.receives("at once"), decoder.receives("later")
    assert decoder.pulls(at_once)
    decoder.wait(10 * LEASE)
    assert decoder.pulls(later)
    assert decoder.admits(later, PROMPT).local_block_ids == ([7, 8, 9],)


def test_steps_of_a_third_of_a_lease_are_healthy(decoder: Decoder) -> None:
    request = decoder.receives()
    for _ in range(10):
        decoder.step()
        decoder.clock.now += LEASE / 3
        assert decoder.pulls(request)


@pytest.mark.parametrize("in_company", [False, True])
def test_a_request_that_was_read_late_is_computed_here(clock: Clock, in_company: bool) -> None:
    decoder = Decoder(clock, in_company)
    request = decoder.receives(arrived=decoder.clock.now - STOOD_STILL)
    assert decoder.looks(request) == (0, False)


def test_a_request_that_waited_while_its_engine_stood_still_is_computed_here(decoder: Decoder) -> None:
    request = decoder.receives()
    decoder.wait(LEASE)
    decoder.clock.now += STOOD_STILL
    assert decoder.looks(request) == (0, False)


def test_a_heartbeat_that_is_too_late_does_not_help(decoder: Decoder) -> None:
    request = decoder.receives()
    decoder.step()
    decoder.clock.now += STOOD_STILL
    later = decoder.receives("later")
    decoder.wait(LEASE)
    assert decoder.looks(request) == (0, False)
    assert decoder.pulls(later)


def test_a_step_without_a_heartbeat_is_no_sign(decoder: Decoder) -> None:
    request = decoder.receives()
    decoder.wait(2)
    decoder.clock.now += STOOD_STILL - 2
    assert decoder.looks(request) == (0, False)


def test_what_no_heartbeat_names_is_not_kept_by_one(decoder: Decoder) -> None:
    named, unnamed = decoder.receives("named"), decoder.receives("unnamed", tp_size=None)
    decoder.wait(LEASE)
    assert decoder.pulls(named)
    assert decoder.looks(unnamed) == (0, False)


def test_what_is_computed_here_stays_so_and_is_said_once(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    request = decoder.receives(arrived=decoder.clock.now - STOOD_STILL)
    with caplog.at_level(logging.WARNING, "vllm.schedloom"):
        for _ in range(3):
            assert decoder.looks(request) == (0, False)
            decoder.wait(LEASE // 3)
    assert [record.args for record in caplog.records] == [("r", LEASE)]


@pytest.mark.parametrize("both_ways", [False, True])
def test_the_prefiller_is_told_that_nobody_pulls(clock: Clock, both_ways: bool) -> None:
    """As if the whole prompt had been here, and once, also after a preemption."""
    decoder = Decoder(clock, bidirectional_kv_xfer=both_ways)
    request = decoder.receives(arrived=clock.now - STOOD_STILL)
    tokens, _ = decoder.looks(request)
    told = decoder.admits(request, tokens)
    assert (told.remote.request_id, told.local_block_ids, told.awaiting_kvs) == ("prefill of r", (), False)
    assert decoder.looks(request) == (0, False)
    assert decoder.admits(request, 0) is None
    assert not decoder.side._heartbeat_req_engine and not decoder.side._heartbeat_by_engine


def test_one_that_leaves_before_it_is_admitted_tells_the_prefiller_too(decoder: Decoder) -> None:
    request = decoder.receives(arrived=decoder.clock.now - STOOD_STILL)
    decoder.looks(request)
    decoder.side.request_finished(request, ())
    assert decoder.step().reqs_to_recv["r"].remote.request_id == "prefill of r"


def test_a_prompt_that_is_here_is_nobodys_loss(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    request = decoder.receives(arrived=decoder.clock.now - STOOD_STILL)
    with caplog.at_level(logging.WARNING, "vllm.schedloom"):
        assert decoder.looks(request, here=PROMPT) == (0, False)
    assert not caplog.records


def test_what_others_ask_is_answered_as_vllm_does(clock: Clock) -> None:
    """Prefills, plain requests, and those that pull from a Decoder, whose KV is kept by other rules."""
    decoder = Decoder(clock, bidirectional_kv_xfer=True)
    back = decoder.receives("back", do_remote_prefill=False, do_remote_decode=True, remote_num_tokens=200)
    plain = decoder.receives("plain")
    plain.kv_transfer_params = {}
    clock.now += 10 * LEASE
    assert decoder.looks(back) == (200, True)
    assert decoder.looks(plain) == (0, False)


class Worker(NixlPullConnectorWorker):
    """Only as far as it declines: whatever it reads by, it has none."""

    def __init__(self) -> None:
        self._recving_metadata: Any = {}
        self._recv_failures: set[str] = set()

    def __del__(self) -> None:
        pass

    def begins(self, name: str, meta: Any) -> bool:
        """Whether it goes on to read what it was told to."""
        if meta.awaiting_kvs:
            self._recving_metadata[name] = meta
        try:
            self._read_blocks_for_req(name, meta)
        except (AttributeError, AssertionError):
            return True
        return False


def test_a_worker_that_stood_still_fails_the_load(decoder: Decoder) -> None:
    worker: Any = Worker()
    for seconds, begun in ((0, True), (LEASE / 3, True), (STOOD_STILL, False)):
        request = decoder.receives(f"after {seconds}")
        assert decoder.pulls(request)
        meta = decoder.admits(request, PROMPT)
        decoder.clock.now += seconds
        assert worker.begins(request.request_id, meta) is begun
    assert worker._recv_failures == {f"after {STOOD_STILL}"}


def test_a_worker_that_stood_still_tells_the_prefiller_that_nobody_pulls(decoder: Decoder) -> None:
    worker: Any = Worker()
    request = decoder.receives(arrived=decoder.clock.now - STOOD_STILL)
    assert worker.begins("r", decoder.admits(request, decoder.looks(request)[0]))


def test_a_heartbeat_of_the_same_step_does_not_help_the_pull(decoder: Decoder) -> None:
    """A worker reads first, and what it is sent may be sent late."""
    request = decoder.receives()
    decoder.clock.now += LEASE / 3
    assert decoder.admits(request, decoder.looks(request)[0]).kept_until == request.arrival_time + LEASE / 2


def test_another_vllm_is_left_as_it_is(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(expired, "_WORKER_SEAMS", ("_no_such",))
    with caplog.at_level(logging.WARNING, "vllm.schedloom"):
        for _ in range(2):
            decoder = Decoder(clock)
    assert len(caplog.records) == 1
    assert decoder.pulls(decoder.receives(arrived=clock.now - 10 * LEASE))


def test_vllm_alone_pulls_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it did not, this module would have nothing to do."""
    assert not hasattr(NixlPullConnectorScheduler, expired.MARK)
    monkeypatch.setattr(expired, "_pull_what_is_kept_only", lambda: None)
    decoder = Decoder(Clock())
    assert decoder.pulls(decoder.receives(arrived=decoder.clock.now - 10 * LEASE))
