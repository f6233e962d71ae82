"""A3, A4, A7, A8, B5: what a real Decoder with append-prefill answers to a client that speaks to it directly."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedloom.adapters.engine.control import POLL_SECONDS
from schedloom.core.wire import (
    CONTRACT_PATH,
    LOCAL_ATTEMPT_KEY,
    PROTOCOL_VERSION,
    REJECTION_PREFIX,
    EngineContract,
)
from schedloom.demo.engines import Engine, EngineFailed, EngineSpec, Fleet, free_ports
from schedloom.demo.model import cached_model
from schedloom.demo.scenario import APPEND_ON

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PLUGINS = {"VLLM_PLUGINS": "schedloom,schedloom_cpu_engine"}
MARK = {"vllm_xargs": {LOCAL_ATTEMPT_KEY: PROTOCOL_VERSION}}
IDLE_SECONDS = 3.0
BLOCK = 32


def decoder_spec(runner: Any, **changes: Any) -> EngineSpec:
    ports = free_ports(2)
    settings: dict[str, Any] = {
        "role": "consumer",
        "additional_config": APPEND_ON,
        "environment": PLUGINS,
        **changes,
    }
    return EngineSpec("decoder", ports[0], side_channel_port=ports[1], runner=runner, **settings)


@pytest.fixture(scope="module", params=["v1", "v2"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    specification = decoder_spec(request.param)
    with Fleet([specification], cached_model(), tmp_path_factory.mktemp("logs")) as fleet:
        yield fleet.engines["decoder"]


def post(engine: Engine, path: str, body: dict[str, Any], timeout: float = 60) -> str:
    request = urllib.request.Request(
        f"{engine.url}{path}",
        json.dumps({"model": "demo", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        answer: str = response.read().decode()
    return answer


def prompt(seed: int, length: int = 300) -> list[int]:
    return [32 + (seed * 31 + index * 7 + index * index // 5) % 90 for index in range(length)]


def complete(engine: Engine, tokens: list[int], **more: Any) -> Any:
    body = {"prompt": tokens, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **more}
    return json.loads(post(engine, "/v1/completions", body))


def metric(engine: Engine, name: str) -> float:
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def until_none(engine: Engine, *names: str) -> None:
    """Figures follow answers a moment later."""
    for _ in range(100):
        if not any(metric(engine, name) for name in names):
            return
        time.sleep(0.1)
    raise AssertionError({name: metric(engine, name) for name in names})


def test_the_contract_is_served(decoder: Engine) -> None:
    with urllib.request.urlopen(f"{decoder.url}{CONTRACT_PATH}", timeout=60) as response:
        contract = EngineContract.model_validate_json(response.read())
    assert contract.role.value == "consumer"
    assert contract.models == ["demo"]
    assert contract.block_size == BLOCK
    assert contract.features == ["append_prefill"]
    assert contract.model_runner == decoder.spec.runner
    assert contract.kv_lease_seconds == 30
    assert contract.data_parallel_size == 1


def test_a_cold_attempt_is_rejected_in_json(decoder: Engine) -> None:
    choice = complete(decoder, prompt(1), **MARK)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == REJECTION_PREFIX + "no_usable_prefix"
    assert choice["token_ids"] == []
    until_none(decoder, "vllm:kv_cache_usage_perc", "vllm:num_requests_waiting")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_cold_attempt_streams_no_token(decoder: Engine, path: str) -> None:
    message = [{"role": "user", "content": "x" * 200 + path}]
    body = {"messages": message} if "chat" in path else {"prompt": prompt(2)}
    events = post(decoder, path, {**body, "max_tokens": 8, "stream": True, **MARK}).split("\n\n")
    choices = [choice for event in events if event.startswith("data: {") for choice in json.loads(event[6:])["choices"]]
    assert events[-2:] == ["data: [DONE]", ""]
    assert not any(choice.get("text") or choice.get("delta", {}).get("content") for choice in choices)


def test_an_unmarked_cold_request_is_served(decoder: Engine) -> None:
    choice = complete(decoder, prompt(3))["choices"][0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 8)


def test_a_warm_attempt_is_served_exactly(decoder: Engine) -> None:
    history = prompt(4)
    history += complete(decoder, history, max_tokens=40)["choices"][0]["token_ids"] + prompt(5, 20)
    attempt = complete(decoder, history, **MARK)
    reused = attempt["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused == (300 + 39) // 32 * 32
    undisturbed = complete(decoder, history, cache_salt="no reuse")
    assert attempt["choices"][0]["token_ids"] == undisturbed["choices"][0]["token_ids"]


def test_a_suffix_of_any_length_is_exact(decoder: Engine) -> None:
    """Of one token, which a decode has too, and of lengths around a block's."""
    resident = prompt(6, 9 * BLOCK)
    complete(decoder, resident)
    for length in (1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1):
        attempt = complete(decoder, whole := resident + prompt(60 + length, length), **MARK)
        assert attempt["usage"]["prompt_tokens_details"]["cached_tokens"] == len(resident)
        undisturbed = complete(decoder, whole, cache_salt="no reuse")
        assert attempt["choices"][0]["token_ids"] == undisturbed["choices"][0]["token_ids"], f"a suffix of {length}"


@pytest.mark.parametrize("everybody", [False, True], ids=["server", "every process"])
def test_a_signal_switches_policies_off_and_another_back(decoder: Engine, everybody: bool) -> None:
    keeper = decoder.process.pid
    server = int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text())
    for number, mode, reason in ((signal.SIGUSR1, "off", "length"), (signal.SIGUSR2, "on", "stop")):
        for process in [server, *(started_by(server) if everybody else ())]:
            os.kill(process, number)
        wait_for_mode(decoder, mode)
        time.sleep(POLL_SECONDS)
        assert complete(decoder, prompt(90 + number + everybody), **MARK)["choices"][0]["finish_reason"] == reason


def started_by(server: int) -> list[int]:
    """Its engine processes; not Python's own helper, which has no plug-ins."""
    children = map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
    return [child for child in children if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_for_mode(engine: Engine, mode: str) -> None:
    for _ in range(100):
        with urllib.request.urlopen(f"{engine.url}/schedloom/policies", timeout=60) as response:
            if json.load(response) == {"append_prefill": mode}:
                return
        time.sleep(0.1)
    raise AssertionError(f"append_prefill is not {mode}")


def test_an_idle_decoder_rests(decoder: Engine) -> None:
    """NIXL's progress thread would keep a core busy."""
    before = cpu_seconds(decoder)
    time.sleep(IDLE_SECONDS)
    assert (cpu_seconds(decoder) - before) / IDLE_SECONDS < 0.3


def cpu_seconds(engine: Engine) -> float:
    """Processor time of the server and everything it started."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            environment = (stat.parent / "environ").read_bytes()
            fields = stat.read_text().rsplit(") ", 1)[1].split()
        except OSError:
            continue
        if f"VLLM_NIXL_SIDE_CHANNEL_PORT={engine.spec.side_channel_port}\0".encode() in environment:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"role": "producer"}, 'this engine\'s KV role is \'producer\': give it "kv_role": "kv_consumer"'),
        ({"arguments": ("--no-enable-prefix-caching",)}, "start the engine with --enable-prefix-caching"),
    ],
    ids=["producer", "no prefix cache"],
)
def test_an_engine_that_cannot_carry_the_policy_does_not_start(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(EngineFailed), Fleet([decoder_spec("v1", **changes)], cached_model(), tmp_path):
        pass
    last_line = (tmp_path / "decoder.log").read_text().rstrip().splitlines()[-1]
    assert sentence in last_line
