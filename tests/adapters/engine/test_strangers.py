"""SEC-1: transfer parameters that lead to a stranger reach no connector, on vLLM's real schedulers."""

import logging
from pathlib import Path
from typing import Any

import pytest

from schedloom.adapters.engine.selection import scheduler_class
from tests.adapters.engine.harness import FakeRunner, make_request, make_scheduler, stock_class, tokens, vllm_config

PEERS = {"scheduler_config": {"transfer_peers": ["10.0.0.1:5600"]}}
KNOWN = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 5600, "remote_block_ids": []}
STRANGE = {**KNOWN, "remote_host": "203.0.113.9"}


class Told:
    """Notes what the connector gets to see of each request."""

    def __init__(self, connector: Any) -> None:
        self.parameters: list[Any] = []
        told = connector.on_new_request

        def on_new_request(request: Any) -> Any:
            self.parameters.append(request.kv_transfer_params)
            return told(request)

        connector.on_new_request = on_new_request


@pytest.fixture
def runner(model: Path, asynchronous: bool) -> FakeRunner:
    config = vllm_config(model, asynchronous=asynchronous, additional=PEERS)
    return FakeRunner(make_scheduler(scheduler_class(stock_class(asynchronous), config), config), asynchronous)


def request_with(parameters: Any, name: str = "r", marked: bool = False) -> Any:
    request = make_request(name, tokens(1, 40), marked=marked)
    request.kv_transfer_params = dict(parameters) if parameters else None
    return request


def test_a_stranger_is_seen_by_no_connector_and_the_request_ends_in_an_error(
    runner: FakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told(runner.scheduler.connector)
    with caplog.at_level(logging.ERROR):
        runner.scheduler.add_request(request_with(STRANGE))
    runner.drain()
    assert told.parameters == [None]
    assert runner.ended["r"][0] == "error"
    assert runner.produced.get("r", []) == []
    (record,) = caplog.records
    assert "203.0.113.9:5600" in record.getMessage() and "transfer_peers" in record.getMessage()


@pytest.mark.parametrize("parameters", [KNOWN, None, {"do_remote_decode": True, "remote_host": None}])
def test_everybody_else_is_served(runner: FakeRunner, parameters: Any) -> None:
    told = Told(runner.scheduler.connector)
    runner.scheduler.add_request(request_with(parameters))
    runner.drain()
    assert told.parameters == [parameters] or told.parameters[0].items() >= (parameters or {}).items()
    assert (runner.ended["r"][0], len(runner.produced["r"])) == ("length", 4)


def test_others_are_not_disturbed(runner: FakeRunner) -> None:
    for number in range(6):
        runner.scheduler.add_request(request_with(STRANGE if number % 2 else KNOWN, f"r{number}"))
    runner.drain()
    assert [runner.ended[f"r{number}"][0] for number in range(6)] == ["length", "error"] * 3


def test_a_misled_request_that_is_aborted_leaves_nothing(runner: FakeRunner) -> None:
    from vllm.v1.request import RequestStatus

    runner.scheduler.add_request(request_with(STRANGE))
    runner.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    runner.scheduler.add_request(request_with(None, "s"))
    runner.drain()
    assert "r" not in runner.ended and runner.ended["s"][0] == "length"


def test_without_peers_the_scheduler_is_vllms_own(model: Path) -> None:
    assert scheduler_class(stock_class(False), vllm_config(model)) is stock_class(False)
