"""A7, X9: what an engine serves beside vLLM's own API."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest
from fastapi import FastAPI, HTTPException
from prometheus_client import mmap_dict
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from starlette.requests import Request

from schedloom.adapters.engine import control, endpoint
from schedloom.adapters.engine.endpoint import SchedloomEndpoint
from tests.adapters.engine.harness import vllm_config

shared: Any = mmap_dict
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


def asking(body: str) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body.encode()}

    return Request({"type": "http", "headers": []}, receive)


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
    call(app, "/schedloom/policies/{name}", "PUT", name="append_prefill", request=asking('{"mode": "shadow"}'))
    assert call(app, "/schedloom/contract", "GET")["inactive"] == ["append_prefill"]
    assert call(app, "/schedloom/policies", "GET") == {"append_prefill": "shadow"}


def test_a_switch_is_logged_as_a_signals_is(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(endpoint.logger, "warning", lambda form, *words: told.append(form % words))
    for body in ('{"mode": "off"}', '{"mode": "of"}'):
        with suppress(HTTPException):
            call(app, "/schedloom/policies/{name}", "PUT", name="append_prefill", request=asking(body))
    assert told == ["policy 'append_prefill' is off, by PUT /schedloom/policies/append_prefill"]


def test_a_policy_that_is_not_on_cannot_be_switched(app: FastAPI) -> None:
    with pytest.raises(Exception, match="'other' is not on in this engine; on are: append_prefill"):
        call(app, "/schedloom/policies/{name}", "PUT", name="other", request=asking('{"mode": "off"}'))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ('{"mod": "off"}', "unknown key 'mod'; did you mean 'mode'?"),
        ('{"mode": "off", "seconds": 5}', "unknown key 'seconds'; known are: mode"),
        ("{}", "mode is missing"),
        ('{"mode": "of"}', "mode: must be 'on', 'shadow' or 'off'"),
        ('{"mode": "off", "mode": "on"}', "the body is no JSON: key 'mode' stands twice"),
        ("mode=off", "the body is no JSON"),
        ('"off"', 'the body must be a JSON object such as {"mode": "off"}'),
        ("[" * 100_000, "the body is no JSON: it is nested too deeply"),
    ],
)
def test_a_switch_that_says_anything_else_is_refused_and_nothing_is_switched(
    app: FastAPI, body: str, sentence: str
) -> None:
    with pytest.raises(HTTPException) as refused:
        call(app, "/schedloom/policies/{name}", "PUT", name="append_prefill", request=asking(body))
    assert refused.value.status_code == 400 and refused.value.detail.startswith(sentence)
    assert call(app, "/schedloom/policies", "GET") == {"append_prefill": "on"}


def test_what_a_switch_says_is_described(app: FastAPI) -> None:
    described = app.openapi()["paths"]["/schedloom/policies/{name}"]["put"]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["mode"] and schema["additionalProperties"] is False
    assert [parameter["name"] for parameter in described["parameters"]] == ["name"]


def test_several_servers_show_the_decisions_beside_what_they_count_together(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives several API servers a folder, and shows on ``/metrics`` what their processes wrote there alone."""
    monkeypatch.setenv(control.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    decided = [["append_prefill", "admit", "REJECT", "no_usable_prefix", 3]]
    (tmp_path / "decisions-1.json").write_text(json.dumps(decided))
    for process in (1, 2):
        file = shared.MmapedDict(str(tmp_path / f"counter_{process}.db"))
        file.write_value(shared.mmap_key("vllm:a", "vllm:a_total", [], [], "A."), 2.0, 0.0)
        file.close()
    app = started(model)
    assert {sample.name: sample.value for sample in shown(app)} == {
        "schedloom_decisions_total": 3,
        "vllm:a_total": 4,
    }
    assert [sample.name for sample in shown(app, "schedloom_decisions_total")] == ["schedloom_decisions_total"]


def test_one_server_leaves_its_metrics_to_vllm(app: FastAPI) -> None:
    routes: Any = app.routes
    assert "/metrics" not in [route.path for route in routes]


def shown(app: FastAPI, *names: str) -> list[Sample]:
    query = urlencode([("name[]", name) for name in names]).encode()
    request = Request({"type": "http", "query_string": query, "headers": []})
    answer = call(app, "/metrics", "GET", request=request)
    return [sample for family in text_string_to_metric_families(answer.body.decode()) for sample in family.samples]
