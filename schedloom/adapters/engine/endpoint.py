"""What an engine with schedloom serves beside vLLM's own API (entry-point group ``vllm.endpoint_plugins``).

vLLM adds an endpoint plug-in only where ``VLLM_PLUGINS`` names it: set ``VLLM_PLUGINS=schedloom``.

- ``GET /schedloom/contract``: the engine's contract, for the router.
- ``GET /schedloom/policies``: the policies that are on, and how they are switched.
- ``PUT /schedloom/policies/NAME`` with ``{"mode": "on" | "shadow" | "off"}``: switch one while the engine runs.
- ``schedloom_decisions_total`` on ``/metrics``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from schedloom.adapters.engine.contract import describe_engine
from schedloom.adapters.engine.control import Mode, epoch, modes_of, published_counts, switch
from schedloom.core.errors import ConfigurationError, explain
from schedloom.core.reading import parse_json
from schedloom.core.settings import StrictSettings
from schedloom.core.wire import CONTRACT_PATH, EngineContract

logger = logging.getLogger("vllm.schedloom")

POLICIES_PATH = "/schedloom/policies"
METRICS_PATH = "/metrics"
SHARED_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class PolicySwitch(StrictSettings):
    """How a policy is to take part."""

    mode: Mode


_SWITCH_BODY: Final = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": PolicySwitch.model_json_schema()}}}
}


class SchedloomEndpoint:
    """vLLM's ``EndpointPlugin`` for schedloom."""

    name = "schedloom"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        # vLLM lets a plug-in's route be found only when it is a route of FastAPI, which vLLM brings.
        from fastapi import HTTPException

        @app.get(CONTRACT_PATH)  # type: ignore[untyped-decorator]
        async def contract() -> dict[str, Any]:
            return _contract(app).model_dump(mode="json")

        @app.get(POLICIES_PATH)  # type: ignore[untyped-decorator]
        async def policies() -> dict[str, str]:
            return modes_of(_contract(app).features)

        @app.put(POLICIES_PATH + "/{name}", openapi_extra=_SWITCH_BODY)  # type: ignore[untyped-decorator]
        async def switch_policy(name: str, request: Request) -> dict[str, str]:
            features = _contract(app).features
            if name not in features:
                raise HTTPException(404, f"policy {name!r} is not on in this engine; on are: {', '.join(features)}")
            try:
                mode = asked_mode(await request.body())
            except ConfigurationError as error:
                raise HTTPException(400, str(error)) from error
            switch(name, mode)
            logger.warning("policy %r is %s, by PUT %s/%s", name, mode.value, POLICIES_PATH, name)
            return {name: mode.value}

        if SHARED_METRICS_VARIABLE in os.environ:
            app.get(METRICS_PATH, include_in_schema=False)(metrics_of_all_servers)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        models = args.served_model_name or [args.model]
        contract = describe_engine(engine_client.vllm_config, list(models), epoch())
        state.schedloom_contract = contract.model_copy(update=_parsers(args))
        DecisionCollector.register_once()


def asked_mode(body: bytes) -> Mode:
    """Raises ConfigurationError for anything but ``{"mode": "on" | "shadow" | "off"}``."""
    try:
        asked = parse_json(body)
    except ValueError as error:
        raise ConfigurationError(f"the body is no JSON: {error}") from error
    if not isinstance(asked, dict):
        raise ConfigurationError('the body must be a JSON object such as {"mode": "off"}')
    try:
        return PolicySwitch.model_validate(asked).mode
    except ValidationError as error:
        raise ConfigurationError(explain(error, PolicySwitch)) from error


def _parsers(args: Any) -> dict[str, str | None]:
    """What makes tool calls and reasoning of the model's text, where the server was told."""
    named = {"tool_parser": "tool_call_parser", "reasoning_parser": "reasoning_parser"}
    return {field: getattr(args, option, None) or None for field, option in named.items()}


def _contract(app: Any) -> EngineContract:
    contract: EngineContract = app.state.schedloom_contract
    inactive = [name for name, mode in modes_of(contract.features).items() if mode != Mode.ON.value]
    return contract.model_copy(update={"inactive": sorted(inactive)})


async def metrics_of_all_servers(request: Request) -> Response:
    """vLLM's own ``/metrics`` of several API servers, with the decisions: there it reads none but its shared files."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    registry.register(DecisionCollector())
    names = request.query_params.getlist("name[]")
    shown = registry.restricted_registry(names) if names else registry
    return Response(generate_latest(shown), media_type=CONTENT_TYPE_LATEST)


class DecisionCollector(Collector):
    """The decisions of this server's engine processes, as one counter with a bounded set of labels."""

    _registered = False

    @classmethod
    def register_once(cls) -> None:
        if not cls._registered:
            REGISTRY.register(cls())
            cls._registered = True

    def describe(self) -> Iterator[CounterMetricFamily]:
        yield self._family()

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = self._family()
        for policy, hook, decision, reason, count in published_counts():
            family.add_metric([policy, hook, decision, reason], count)
        yield family

    def _family(self) -> CounterMetricFamily:
        labels = ("policy", "hook", "decision", "reason")
        return CounterMetricFamily("schedloom_decisions", "Decisions of scheduling policies.", labels=labels)
