"""The router's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationError

from schedloom.core.composition import ChoosingSettings, PolicyChoice
from schedloom.core.config import engine_key
from schedloom.core.errors import ConfigurationError, complaints
from schedloom.core.reading import read_mapping
from schedloom.core.settings import StrictSettings
from schedloom.core.wire import EngineContract, KvEndpoint
from schedloom.router.addresses import VISIBLE, CollectorUrl, EngineUrl, StoreUrl

OWNER_POLICY = "session_owner"
PULL_BACK_POLICY = "pull_back"

BY_OPTIONS = "--prefill URL and --decode URL"

_CREDENTIALS = ("authorization", "cookie", "proxy-authorization")
_HEADER_NAME = re.compile(r"[\w!#%&'*+.^`|~-]+", re.ASCII).fullmatch
_PATH = re.compile(r"\$(\.[^.]+)+").fullmatch

Seconds = Annotated[float, Field(gt=0)]


class DeclaredEndpoint(KvEndpoint, StrictSettings):
    """Where an engine that does not serve a contract itself has its KV."""


class DeclaredContract(EngineContract, StrictSettings):
    """What an operator promises on behalf of an engine that does not serve a contract itself."""

    kv_endpoints: list[DeclaredEndpoint] = []  # type: ignore[assignment]


class WorkerSettings(StrictSettings):
    """One engine.

    ``role`` restricts what the router uses it for; without one the engine's own role decides. ``contract`` is
    for an engine without schedloom.
    """

    url: EngineUrl
    role: Literal["prefill", "decode"] | None = None
    contract: DeclaredContract | None = None


def _checked_key(key: SecretStr) -> SecretStr:
    if not VISIBLE(key.get_secret_value()):
        raise ValueError("it must be of visible ASCII characters, to be sent in a header")
    return key


def _checked_session_name(place: str) -> str:
    if place.lower() in _CREDENTIALS:
        raise ValueError(f"{place!r} carries credentials, which engines would be told as a session")
    if not (_HEADER_NAME(place) or _PATH(place)):
        raise ValueError(f"{place!r} is neither a header's name nor a path in the body, as $.metadata.session")
    return place


def _named_once(workers: list[WorkerSettings]) -> list[WorkerSettings]:
    urls = [worker.url for worker in workers]
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(f"{url} is named twice; name an engine that does both once, without a role")
    return workers


class ApiKeySettings(StrictSettings):
    """One API key and the tenant it belongs to; a tenant may have several."""

    key: Annotated[SecretStr, Field(min_length=8)]
    tenant: Annotated[str, Field(min_length=1)]


class TraceSettings(StrictSettings):
    """Which requests are told as spans of OpenTelemetry, and where.

    ``endpoint`` takes them by OTLP over HTTP. ``ratio`` is the share of requests that are traced, beside those whose
    client says (in ``traceparent``) that it traces them; what a client does not trace is not traced here either.
    """

    endpoint: CollectorUrl = "http://127.0.0.1:4318/v1/traces"
    ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    service: Annotated[str, Field(min_length=1)] = "schedloom-router"


class RouterSettings(ChoosingSettings):
    """All that the router can be told. Times are in seconds, sizes in bytes.

    ``handoff_timeout_seconds`` bounds the time between a Prefiller's answer and the dispatch of its Decoder;
    it must stay below the engines' KV lease. For ``handoff_settle_seconds`` after a hand-over the client's
    leaving is kept from the Decoder, so that it surely takes the KV up and the Prefiller is rid of it.
    ``first_byte_timeout_seconds`` covers queueing and prefill on an engine, ``silence_timeout_seconds`` a
    pause within an answer, ``request_timeout_seconds`` everything. ``start_wait_seconds`` is how long a start
    waits for engines. A file may leave ``workers`` out: options name engines too.

    ``max_in_flight`` requests are served at once and ``max_waiting`` wait for that, each for at most
    ``waiting_timeout_seconds``. A request that its Decoder hands back for lack of KV
    blocks is continued elsewhere at most ``max_continuations`` times; 0 keeps Decoders from handing any back.

    ``session_names`` are further places where clients name their sessions, after the usual ones and in this order:
    headers, and paths of strings in the body, as ``$.metadata.session``.

    ``callback_url`` is where engines reach this router, for those that ask it for prefills; without one it is
    ``host`` and ``port``.

    ``processes`` of one router share its port, its sessions and its figures; the limits above are for all of
    them together. ``session_store`` is the address of a Valkey or Redis server that keeps the sessions of
    several routers; without one they are kept in memory, at most ``session_capacity`` of them.

    With ``traces`` some requests are told as spans of OpenTelemetry.

    With ``api_keys`` every client needs one; sessions and the engines' prefix caches are then kept apart by
    tenant, the latter unless ``share_prefix_across_tenants``. ``secret`` derives what keeps them apart; give
    all replicas of a router the same, otherwise it is made anew at every start. ``forward_authorization``
    hands the client's Authorization header to the engines; otherwise they see ``engine_api_key``, where set.
    """

    kind: Literal["router"] = "router"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 9000
    workers: Annotated[list[WorkerSettings], Field(min_length=1), AfterValidator(_named_once)] = []
    policies: list[PolicyChoice] = []
    enable_decoder_append_prefill: bool = False

    request_timeout_seconds: Seconds = 3600.0
    header_timeout_seconds: Seconds = 10.0
    body_timeout_seconds: Seconds = 30.0
    connect_timeout_seconds: Seconds = 5.0
    first_byte_timeout_seconds: Seconds = 600.0
    silence_timeout_seconds: Seconds = 300.0
    handoff_timeout_seconds: Seconds = 10.0
    handoff_settle_seconds: Seconds = 1.0
    health_interval_seconds: Seconds = 5.0
    health_timeout_seconds: Seconds = 5.0
    start_wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    callback_url: EngineUrl | None = None
    shutdown_grace_seconds: Seconds = 30.0

    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    max_in_flight: Annotated[int, Field(ge=1)] = 4096
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    waiting_timeout_seconds: Seconds = 30.0

    max_continuations: Annotated[int, Field(ge=0)] = 8
    session_capacity: Annotated[int, Field(ge=1)] = 100_000
    session_idle_seconds: Seconds = 3600.0
    traces: TraceSettings | None = None
    session_names: list[Annotated[str, AfterValidator(_checked_session_name)]] = []
    session_store: StoreUrl | None = None

    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 2**10
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * 2**20

    api_keys: list[ApiKeySettings] = []
    secret: SecretStr | None = None
    share_prefix_across_tenants: bool = False
    engine_api_key: Annotated[SecretStr, AfterValidator(_checked_key)] | None = None
    forward_authorization: bool = False

    @property
    def switches(self) -> Mapping[str, str]:
        """Keys that switch one policy on."""
        return {"enable_decoder_append_prefill": OWNER_POLICY}

    @property
    def choices(self) -> list[PolicyChoice]:
        """The routing policies that are on, general form and switch together."""
        chosen = [choice.at(f"policies[{place}]") for place, choice in enumerate(self.policies)]
        if self.enable_decoder_append_prefill and OWNER_POLICY not in {choice.name for choice in chosen}:
            chosen.append(PolicyChoice(name=OWNER_POLICY).at("enable_decoder_append_prefill"))
        return chosen

    @property
    def pulls_back(self) -> bool:
        """Whether Prefillers may pull what a session's Decoder kept."""
        return any(choice.name == PULL_BACK_POLICY for choice in self.choices)

    @property
    def append_prefill(self) -> bool:
        """Whether local attempts may be made."""
        return any(choice.name == OWNER_POLICY for choice in self.choices)


def router_settings(values: Mapping[str, Any], source: object = "router configuration") -> RouterSettings:
    """Settings from plain values, with engines. Raises ConfigurationError with a sentence about each that does not fit;
    it begins with ``source``.
    """
    try:
        settings = RouterSettings.model_validate(dict(values))
    except ValidationError as error:
        found = complaints(error, RouterSettings)
        raise ConfigurationError(*(f"{source}: {sentence}" for sentence in found)) from error
    if not settings.workers:
        raise ConfigurationError(f"{source}: workers is missing; name the engines there, or with {BY_OPTIONS}")
    return settings


def read_file(path: Path) -> dict[str, Any]:
    """The values of a router's file. Raises ConfigurationError when it cannot be read or is an engine's."""
    values = read_mapping(path)
    key = engine_key(values)
    if key is not None:
        raise ConfigurationError(
            f"{path} is an engine's configuration (key {key!r}); give it to vllm serve, and the router its own"
        )
    return values
