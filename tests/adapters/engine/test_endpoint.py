"""A7, X9: what an engine serves beside vLLM's own API."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from schedloom.adapters.engine import control
from schedloom.adapters.engine.endpoint import SchedloomEndpoint
from tests.adapters.engine.harness import vllm_config

ON = {"scheduler_config": {"decoder_append_prefill_enable": True}}


@pytest.fixture
def app(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    monkeypatch.setenv(control.FOLDER_VARIABLE, str(tmp_path))
    return started(model)


def started(model: Path) -> FastAPI:
    app, endpoint = FastAPI(), SchedloomEndpoint()
    engine = SimpleNamespace(vllm_config=vllm_config(model, additional=ON))
    arguments = SimpleNamespace(
        served_model_name=["name"], model=str(model), tool_call_parser="hermes", reasoning_parser=""
    )
    endpoint.attach_router(app)
    asyncio.run(endpoint.init_state(engine, app.state, arguments))
    return app


def call(app: FastAPI, path: str, method: str, **arguments: Any) -> Any:
    """What the route's function answers, without a server."""
    routes: Any = app.routes
    (route,) = [each for each in routes if each.path == path and method in each.methods]
    return asyncio.run(route.endpoint(**arguments))


def test_the_contract_tells_roles_features_and_a_new_epoch_after_each_start(
    model: Path, app: FastAPI, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = call(app, "/schedloom/contract", "GET")
    assert (contract["role"], contract["models"], contract["features"]) == ("consumer", ["name"], ["append_prefill"])
    assert (contract["tool_parser"], contract["reasoning_parser"]) == ("hermes", None)
    another_process = call(started(model), "/schedloom/contract", "GET")
    assert contract["epoch"] == another_process["epoch"], "servers of one start are one life"
    monkeypatch.setenv(control.FOLDER_VARIABLE, str(tmp_path_factory.mktemp("restarted")))
    assert contract["epoch"] != call(started(model), "/schedloom/contract", "GET")["epoch"]


def test_a_switched_policy_shows_in_the_contract(app: FastAPI) -> None:
    assert call(app, "/schedloom/contract", "GET")["inactive"] == []
    call(app, "/schedloom/policies/{name}", "PUT", name="append_prefill", mode=control.Mode.SHADOW)
    assert call(app, "/schedloom/contract", "GET")["inactive"] == ["append_prefill"]
    assert call(app, "/schedloom/policies", "GET") == {"append_prefill": "shadow"}


def test_a_policy_that_is_not_on_cannot_be_switched(app: FastAPI) -> None:
    with pytest.raises(Exception, match="'other' is not on in this engine; on are: append_prefill"):
        call(app, "/schedloom/policies/{name}", "PUT", name="other", mode=control.Mode.OFF)
