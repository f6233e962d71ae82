"""SEC-1: what an engine tells another through the router is known, bounded, and of its own addresses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from schedloom.core.wire import KvEndpoint, Role
from schedloom.router.failures import Failure
from schedloom.router.fleet.worker import Target, Worker
from schedloom.router.requests.body import GenerationBody
from schedloom.router.requests.call import Call
from schedloom.router.requests.headers import ClientHeaders
from schedloom.router.settings import WorkerSettings
from schedloom.router.telemetry.metrics import Metrics
from schedloom.router.transfer.modes import Mode
from schedloom.router.transfer.pull import PullTransfer
from schedloom.router.transfer.terms import Terms
from tests.router.conftest import Make
from tests.router.fakes import Answer, contract, decoder, prefiller
from tests.router.keeping import Fleet
from tests.router.test_layerwise import ASKED, LayerwisePair
from tests.router.test_transfers import MOONCAKE
from tests.router.waiting import PATIENCE_SECONDS, until

ENDPOINTS = [KvEndpoint(engine_id=f"engine_dp{rank}", host="10.0.0.7", port=5600 + rank) for rank in range(2)]
NIXL: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine_dp0",
    "remote_request_id": "chatcmpl-0123456789abcdef-1a2b3c4d",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 2,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 32,
}
"""As vLLM 0.32 has them in its scheduler and in ``NixlPullConnector``'s; tests/engines/test_pull_back.py shows it."""

KEPT = NIXL | {"do_remote_prefill": False, "do_remote_decode": True, "remote_blocks_expiry_time": 12345.678}
HYBRID = {key: value for key, value in MOONCAKE.items() if key not in ("remote_pcp_size", "remote_dcp_size")}
NODES = {"0": {"host": "10.0.0.7", "engine_id": "p0", "handshake_port": 30000}, "1": {"host": "10.0.0.8"}}
OWN_NODES = {str(rank): {"host": "10.0.0.7", "engine_id": "m", "handshake_port": 30000 + rank} for rank in range(4)}
PULLED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_num_prompt_tokens": 40,
    "remote_engine_id": "p0",
    "remote_request_id": "chatcmpl-x",
    "remote_host": "10.0.0.7",
    "remote_port": 30002,
    "last_token_id": 7,
}
"""As vllm-ascend 0.30.0rc2 has them in ``MooncakePullConnectorScheduler``, which ``MooncakeConnectorV2`` is too."""

REAL = {
    "nixl": NIXL,
    "nixl, kept by a Decoder": KEPT,
    "nixl, several groups of layers": NIXL | {"remote_block_ids": [[1], [], [2, 3]]},
    "nixl, nothing computed": NIXL | {"remote_block_ids": [], "remote_num_tokens": 0},
    "mooncake": MOONCAKE,
    "mooncake, hybrid": HYBRID,
    "mooncake, one block size": MOONCAKE | {"remote_block_size": 128, "remote_block_ids": [4, 5]},
    "mooncake, several nodes": MOONCAKE | {"remote_multi_nodes_meta_mapping": NODES},
    "mooncake, pulled": PULLED,
    "layerwise": ASKED | {"request_id": "chatcmpl-x", "do_virtual": False},
}
"""Of every connector that the router speaks, by its sources."""


def target(**changes: Any) -> Target:
    worker = Worker("prefiller-0", WorkerSettings(url="http://p:1"))
    worker.join(contract(Role.PRODUCER, **changes))
    return worker.targets[0]


def terms(*more_keys: str) -> tuple[Terms, list[Worker]]:
    suspects: list[Worker] = []
    return Terms(more_keys, Metrics(), suspects.append), suspects


@pytest.mark.parametrize("which", REAL)
def test_what_real_engines_tell_is_passed_on_as_it_is(which: str) -> None:
    assert terms()[0].checked(REAL[which], target()) is REAL[which]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("metaserver", "http://evil/"),
        ("remote_bootstrap_addr", "evil:1"),
        ("anything", 1),
        ("remote_host", "h" * 513),
        ("remote_host", ["10.0.0.7"]),
        ("remote_host", 7),
        ("remote_port", 0),
        ("remote_port", -1),
        ("remote_port", 65536),
        ("remote_port", "5600"),
        ("remote_port", True),
        ("remote_port", 5600.0),
        ("tp_size", 2**40),
        ("tp_size", 0),
        ("tp_size", -2),
        ("tp_size", True),
        ("tp_size", 1.0),
        ("remote_ptp_size", 5000),
        ("dcp_size", {}),
        ("remote_num_tokens", -1),
        ("remote_num_tokens", 2**31),
        ("last_token_id", "7"),
        ("remote_blocks_expiry_time", 1e300),
        ("remote_blocks_expiry_time", "soon"),
        ("do_remote_prefill", 1),
        ("do_remote_decode", "true"),
        ("remote_engine_id", "e" * 513),
        ("remote_request_id", {}),
        ("remote_block_ids", 3),
        ("remote_block_ids", "123"),
        ("remote_block_ids", {"1": 2}),
        ("remote_block_ids", [1, -1]),
        ("remote_block_ids", [[1], [2**32]]),
        ("remote_block_ids", [[1, "2"]]),
        ("remote_block_ids", [[1.5]]),
        ("remote_block_ids", [[[1]]]),
        ("remote_block_ids", [[1], 2]),
        ("remote_block_ids", [[1], {}]),
        ("remote_block_ids", [1, [2]]),
        ("remote_block_ids", [[]] * 1025),
        ("remote_block_ids", [0] * (2**20 + 1)),
        ("remote_block_ids", [[0] * 2**19] * 3),
        ("remote_block_size", [16] * 1025),
        ("remote_block_size", [-1]),
        ("remote_multi_nodes_meta_mapping", []),
        ("remote_multi_nodes_meta_mapping", {"0": "10.0.0.7"}),
        ("remote_multi_nodes_meta_mapping", {"0": {"host": 7}}),
        ("remote_multi_nodes_meta_mapping", {"0": {"port": 7}}),
        ("remote_multi_nodes_meta_mapping", {"0": {"handshake_port": 0}}),
        ("remote_multi_nodes_meta_mapping", {"k" * 513: {}}),
        ("remote_multi_nodes_meta_mapping", {str(number): {} for number in range(4097)}),
    ],
)
def test_what_is_not_known_or_not_bounded_is_not_passed_on(
    key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (strict, _), source = terms(), target()
    for before in (NIXL, NIXL | {"tp_size": 4}):
        with pytest.raises(Failure) as refused:
            strict.checked(NIXL | {key: value}, source)
        if value == NIXL.get(key):
            break
        assert strict.checked(before, source)
    assert (refused.value.status, json.loads(refused.value.body)["error"]["code"]) == (502, "bad_transfer_parameters")
    assert key in caplog.text and "prefiller-0" in caplog.text and len(caplog.text) < 1000
    assert key not in refused.value.body.decode()


@pytest.mark.parametrize("key", [key for key in NIXL if key not in ("remote_host", "remote_port")])
def test_what_is_not_told_is_not_missed(key: str) -> None:
    left = {name: value for name, value in NIXL.items() if name != key}
    for parameters in (left, NIXL | {key: None}):
        assert terms()[0].checked(parameters, target(kv_endpoints=ENDPOINTS)) is parameters


@pytest.mark.parametrize(
    ("change", "stranger"),
    [
        ({"remote_host": "10.0.0.9"}, "10.0.0.9:5600"),
        ({"remote_host": "169.254.169.254", "remote_port": 80}, "169.254.169.254:80"),
        ({"remote_port": 5602}, "10.0.0.7:5602"),
        ({"remote_host": None}, "None:5600"),
        ({"remote_multi_nodes_meta_mapping": NODES}, "10.0.0.8"),
    ],
)
def test_an_engine_names_no_address_but_its_own(
    change: dict[str, Any], stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    (strict, suspects), source = terms(), target(kv_endpoints=ENDPOINTS)
    assert strict.checked(NIXL, source) and strict.checked(NIXL, source)
    assert strict.checked(NIXL | {"remote_port": 5601}, source)
    with pytest.raises(Failure):
        strict.checked(NIXL | change, source)
    assert stranger in caplog.text and suspects == [source.worker]
    assert strict.checked(NIXL | change, target()), "where it does not tell its addresses any is its own"


@pytest.mark.parametrize("parameters", [MOONCAKE, MOONCAKE | {"remote_multi_nodes_meta_mapping": OWN_NODES}, HYBRID])
def test_mooncakes_addresses_are_its_own_or_refused(parameters: dict[str, Any]) -> None:
    own = [KvEndpoint(engine_id=f"m_dp{rank}", host="10.0.0.7", port=30000 + 4 * rank) for rank in range(2)]
    (strict, suspects), source = terms(), target(kv_endpoints=own)
    for told in (parameters, parameters | {"remote_port": 30004}):
        assert strict.checked(told, source) is told
    strangers = {"remote_host": "10.0.0.9"}, {"remote_port": 30001}, {"remote_multi_nodes_meta_mapping": NODES}
    for stranger in strangers:
        with pytest.raises(Failure):
            strict.checked(parameters | stranger, source)
    assert len(suspects) == 3


def test_what_was_its_own_address_is_so_no_more_when_its_contract_changes() -> None:
    (strict, _), source = terms(), target()
    assert strict.checked(NIXL, source)
    source.worker.join(contract(Role.PRODUCER, kv_endpoints=ENDPOINTS[1:]))
    with pytest.raises(Failure):
        strict.checked(NIXL, source)


def test_further_keys_can_be_configured_and_stay_bounded() -> None:
    lenient, _ = terms("newer", "tp_size")
    for value in (None, True, 1, 1.5, "text", [1, 2]):
        assert lenient.checked(NIXL | {"newer": value}, target())
    changes: list[dict[str, Any]] = [
        {"newer": {}},
        {"newer": "t" * 513},
        {"newer": [[1]]},
        {"tp_size": 2**40},
        {"newest": 1},
    ]
    for change in changes:
        with pytest.raises(Failure):
            lenient.checked(NIXL | change, target())


@pytest.mark.anyio
async def test_a_prefiller_that_tells_too_much_is_a_clear_error_and_no_decoder_is_asked(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d)
    p.script = [Answer.of({"kv_transfer_params": NIXL | {"metaserver": "http://evil/"}})]
    received = await router.client.chat("s")
    assert (received.status, received.json["error"]["code"]) == (502, "bad_transfer_parameters")
    assert d.seen == [] and b"evil" not in received.body
    assert router.count("transfer_refusals_total", engine="engine-0") == 1
    assert router.count("requests_total", route="pd", outcome="failed") == 1
    assert (await router.client.chat("s")).status == 200


@pytest.mark.anyio
async def test_another_prefiller_is_asked_where_there_is_one(bench: Make) -> None:
    one, other, d = prefiller(), prefiller(1), decoder()
    router = await bench(one, other, d)
    one.always = Answer.of({"kv_transfer_params": NIXL | {"tp_size": 2**40}})
    assert [(await router.client.chat()).status for _ in range(2)] == [200, 200]
    assert {seen.body["kv_transfer_params"]["tp_size"] for seen in d.seen} == {1}
    assert router.count("transfer_refusals_total", engine="engine-0") >= 1


@pytest.mark.anyio
async def test_an_engine_that_was_restarted_elsewhere_is_looked_at(bench: Make) -> None:
    p, d = prefiller(kv_endpoints=ENDPOINTS), decoder()
    router = await bench(p, d)
    moved = [KvEndpoint(engine_id="engine", host="10.0.0.9", port=5600)]
    p.contract = contract(Role.PRODUCER, kv_endpoints=moved, epoch="e2")
    p.always = Answer.of({"kv_transfer_params": NIXL | {"remote_host": "10.0.0.9"}})
    assert (await router.client.chat()).status == 502
    await until(lambda: router.app.fleet.workers[0].contract.epoch == "e2")
    assert (await router.client.chat()).status == 200


@pytest.mark.anyio
async def test_the_settings_name_further_keys(bench: Make) -> None:
    p, d = prefiller(), decoder()
    router = await bench(p, d, transfer_keys=["newer"])
    p.script = [Answer.of({"kv_transfer_params": NIXL | {"newer": 1}})]
    assert (await router.client.chat()).status == 200
    assert d.seen[0].body["kv_transfer_params"] == NIXL | {"newer": 1}


@pytest.mark.anyio
async def test_what_a_prefiller_tells_too_late_goes_by_the_same_terms(bench: Make) -> None:
    d = decoder()
    router = await bench(prefiller(), d)
    pull = router.app._attempts._transfers[Mode.PULL]
    assert isinstance(pull, PullTransfer)
    call = Call("/v1/completions", GenerationBody(b'{"prompt":"a"}'), ClientHeaders([]), None, None)
    source = router.app.fleet.prefillers[0].targets[0]
    for parameters, asked in ((NIXL | {"metaserver": "http://evil/"}, 0), (NIXL, 1)):
        pull._release(call, source, "id", 200, json.dumps({"kv_transfer_params": parameters}).encode())
        await (until(lambda: d.seen) if asked else asyncio.sleep(0.01))
        assert len(d.seen) == asked


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("endpoints", "change", "decision"),
    [
        ([], {"metaserver": "http://evil/"}, "pd"),
        (ENDPOINTS, {"remote_host": "10.0.0.9"}, "pd"),
        (ENDPOINTS, {}, "pull_back"),
    ],
)
async def test_what_a_decoder_tells_against_the_terms_is_not_remembered(
    bench: Make, endpoints: Any, change: dict[str, Any], decision: str
) -> None:
    fleet = Fleet(kv_endpoints=endpoints)
    router = await bench(fleet.p, fleet.d, append=False, policies=[{"name": "pull_back"}])
    keep = fleet.d._keep
    own = {"remote_host": "10.0.0.7", "remote_port": 5600}
    fleet.d._keep = lambda tokens: keep(tokens) | own | change  # type: ignore[method-assign]
    fleet.p.always = Answer.of({"kv_transfer_params": NIXL})
    for prompt, expected in (("hello", "pd"), (f"hello{fleet.d.output} more", decision)):
        received = await router.client.post("/v1/completions", {"prompt": prompt}, {"X-Session-ID": "s"})
        assert (received.status, received.decision) == (200, expected)
    assert (router.count("transfer_refusals_total", engine="engine-1") > 0) == bool(change)


@pytest.mark.anyio
async def test_a_decoder_that_tells_nothing_goes_against_no_terms(bench: Make) -> None:
    fleet = Fleet(kv_endpoints=ENDPOINTS)
    router = await bench(fleet.p, fleet.d, append=False, policies=[{"name": "pull_back"}])
    fleet.p.always = Answer.of({"kv_transfer_params": NIXL})
    fleet.d._keep = lambda tokens: {}  # type: ignore[method-assign]
    assert (await router.client.chat("s")).status == 200
    assert router.count("transfer_refusals_total", engine="engine-1") == 0


@pytest.mark.anyio
async def test_what_a_decoder_asks_for_goes_by_the_same_terms(bench: Make) -> None:
    pair = LayerwisePair()
    router = await pair.bench(bench)

    async def ask(seen: Any) -> Answer:
        assert await pair.ask(seen, remote_tp_size=2**40) == 200
        await asyncio.Event().wait()
        raise AssertionError

    pair.d.script = [ask, ask]
    received = await asyncio.wait_for(router.client.chat(), PATIENCE_SECONDS)
    assert (received.status, received.json["error"]["code"]) == (502, "bad_transfer_parameters")
    assert pair.p.seen == [] and len(pair.d.seen) == 1
