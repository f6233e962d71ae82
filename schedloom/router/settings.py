"""The router's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, ValidationInfo

from schedloom.core.composition import ChoosingSettings, PolicyChoice
from schedloom.core.config import engine_key
from schedloom.core.errors import ConfigurationError, complaints
from schedloom.core.reading import read_mapping
from schedloom.core.settings import StrictSettings
from schedloom.core.wire import EngineContract, KvEndpoint
from schedloom.router.addresses import VISIBLE, CollectorUrl, EngineUrl, StoreUrl, reached_by
from schedloom.router.requests.bounds import MAX_CHOICES, Bounds

OWNER_POLICY = "session_owner"
PULL_BACK_POLICY = "pull_back"

BY_OPTIONS = "--prefill URL and --decode URL"

_CREDENTIALS = ("authorization", "cookie", "proxy-authorization")
_HEADER_NAME = re.compile(r"[\w!#%&'*+^`|~-]+", re.ASCII).fullmatch
"""No header in use has a dot in its name, though it may: whoever writes one means a path."""
_DOTTED = re.compile(r"\w[^.]*(\.[^.]+)+", re.ASCII).fullmatch
_PATH = re.compile(r"\$(\.[^.]+)+").fullmatch
_ENGINE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?").fullmatch
_GIVEN_NAME = re.compile(r"(prefiller|decoder|engine)-[0-9]+").fullmatch

Seconds = Annotated[float, Field(gt=0)]


class DeclaredEndpoint(KvEndpoint, StrictSettings):
    """Where an engine that does not serve a contract itself has its KV."""


class DeclaredContract(EngineContract, StrictSettings):
    """What an operator promises on behalf of an engine that does not serve a contract itself."""

    kv_endpoints: list[DeclaredEndpoint] = []  # type: ignore[assignment]
    """Where other engines reach its KV connector, in the order of ranks."""


def _checked_engine_name(name: str) -> str:
    if not _ENGINE_NAME(name):
        raise ValueError(f"{name!r} is no name: use letters, digits, and between them also '.', '_' and '-'")
    if _GIVEN_NAME(name):
        raise ValueError(f"{name!r} is of the form that engines without a name are given; choose another")
    return name


class WorkerSettings(StrictSettings):
    """One engine."""

    url: EngineUrl
    """Where the engine serves: `http://host:port`."""
    name: Annotated[str, Field(max_length=48), AfterValidator(_checked_engine_name)] | None = None
    """What it is called in headers, figures and the log: letters and digits, and between them `.`, `_` and `-`. Without
    one the router gives it one, by its role and a number."""
    role: Literal["prefill", "decode"] | None = None
    """What the router uses it for; without one the engine's own KV role decides."""
    contract: DeclaredContract | None = None
    """What an engine without schedloom is; one with schedloom tells it itself."""
    drain: bool = False
    """Nothing new is sent to it; what is under way there ends, and its sessions go on elsewhere."""


def _no_number(workers: Any) -> Any:
    if isinstance(workers, int):
        raise ValueError("must be a list of engines; how many processes serve is told by processes")
    return workers


def _checked_key(key: SecretStr) -> SecretStr:
    if not VISIBLE(key.get_secret_value()):
        raise ValueError("it must be of visible ASCII characters, to be sent in a header")
    return key


def _checked_session_name(place: str) -> str:
    if place.lower() in _CREDENTIALS:
        raise ValueError(f"{place!r} carries credentials, which engines would be told as a session")
    if not (_HEADER_NAME(place) or _PATH(place)):
        if _DOTTED(place):
            raise ValueError(f"{place!r} is no header's name; write a path in the body as $.{place}")
        raise ValueError(f"{place!r} is neither a header's name nor a path in the body, as $.metadata.session")
    return place


def _each_once(workers: list[WorkerSettings]) -> list[WorkerSettings]:
    places = [reached_by(worker.url) for worker in workers]
    for place in dict.fromkeys(places):
        same = [worker for worker, its in zip(workers, places, strict=True) if its == place]
        if len(same) > 1:
            raise ValueError(f"{same[0].url} is named {_once_instead([worker.role for worker in same])}")
    names = [worker.name for worker in workers if worker.name is not None]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is the name of two engines; give each one of its own")
    return workers


def _once_instead(roles: Sequence[str | None]) -> str:
    times = "twice" if len(roles) == 2 else f"{len(roles)} times"
    does_both = len(set(roles)) > 1
    return f"{times}; name an engine that does both once, without a role" if does_both else f"{times}; name it once"


def _at_most_the_largest(tokens: int | None, info: ValidationInfo) -> int | None:
    most = info.data.get("max_output_tokens")
    if tokens is not None and most is not None and tokens > most:
        raise ValueError(f"it must be at most max_output_tokens ({most})")
    return tokens


class ApiKeySettings(StrictSettings):
    """One API key and the tenant it belongs to; a tenant may have several."""

    key: Annotated[SecretStr, Field(min_length=8)]
    """What clients send as `Authorization: Bearer KEY`."""
    tenant: Annotated[str, Field(min_length=1)]
    """Whose key it is. The sessions and the prefix caches of tenants are kept apart."""


def _each_key_once(keys: list[ApiKeySettings]) -> list[ApiKeySettings]:
    known: dict[SecretStr, str] = {}
    for one in keys:
        if one.key in known:
            raise ValueError(f"{known[one.key]} and {one.tenant} have the same key; name each key once")
        known[one.key] = one.tenant
    return keys


class TraceSettings(StrictSettings):
    """Which requests are told as spans of OpenTelemetry, and where."""

    endpoint: CollectorUrl = "http://127.0.0.1:4318/v1/traces"
    """Where a collector takes spans by OTLP over HTTP."""
    ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """The share of requests that are traced, beside those whose client says (in `traceparent`) that it traces them.
    What a client says it does not trace is not traced."""
    service: Annotated[str, Field(min_length=1)] = "schedloom-router"
    """The name under which the spans are shown."""


class RouterSettings(ChoosingSettings):
    """All that the router can be told. Times are in seconds, sizes in bytes."""

    kind: Literal["router"] = "router"
    """Says whose file it is, where its other keys do not."""
    host: str = "127.0.0.1"
    """The address to listen on (`--host`)."""
    port: Annotated[int, Field(ge=0, le=65535)] = 9000
    """The port to listen on (`--port`); 0 is one that is free."""
    workers: Annotated[
        list[WorkerSettings], Field(min_length=1), AfterValidator(_each_once), BeforeValidator(_no_number)
    ] = []
    """The engines. A file may leave them to `--prefill` and `--decode`, which replace those of the file.
    (`--workers` is `processes`.)"""
    policies: list[PolicyChoice] = []
    """Policies by name, each with its settings beside the name. Order means nothing."""
    enable_decoder_append_prefill: bool = False
    """Switches `session_owner` on, with its defaults unless `policies` names it: a session's next turn is tried on the
    Decoder that holds its KV."""

    request_timeout_seconds: Seconds = 3600.0
    """How long a request may take in all."""
    header_timeout_seconds: Seconds = 10.0
    """How long a client may take to send the head of a request."""
    body_timeout_seconds: Seconds = 30.0
    """How long a client may take to send the body of a request."""
    connect_timeout_seconds: Seconds = 5.0
    """How long a connection to an engine may take to open."""
    first_byte_timeout_seconds: Seconds = 600.0
    """How long an engine may take to begin its answer, queueing and prefill included."""
    silence_timeout_seconds: Seconds = 300.0
    """How long an engine may pause within its answer."""
    handoff_timeout_seconds: Seconds = 10.0
    """How long after a Prefiller's answer its Decoder may still be asked. At most the engines' KV lease: KV that is
    pulled later is wrong."""
    handoff_settle_seconds: Seconds = 1.0
    """For how long after a hand-over a client's leaving is kept from the Decoder, so that it takes the KV up and the
    Prefiller is rid of it."""
    health_interval_seconds: Seconds = 5.0
    """How often every engine is asked how it is, and which of its policies are switched off."""
    health_timeout_seconds: Seconds = 5.0
    """How long an engine may take to answer that, or to tokenize a prompt."""
    hung_after_seconds: Seconds = 30.0
    """How long an engine must be silent, while it is asked how it is three times at least, before requests that wait
    there for their first output are given to others."""
    start_wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long a start waits for engines (`--wait`)."""
    transfer_keys: list[str] = []
    """Further keys that the engines' transfer parameters may have, beside those of vLLM 0.32 and vllm-ascend 0.30; what
    has any other key is not passed on from one engine to another."""
    callback_url: EngineUrl | None = None
    """Where engines reach this router, for those that ask it for prefills; without one `host` and `port`."""
    shutdown_grace_seconds: Seconds = 30.0
    """How long requests under way may go on after SIGTERM or SIGINT."""

    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that serve (`--workers`). They share the port, the sessions, the figures and the limits below."""
    max_in_flight: Annotated[int, Field(ge=1)] = 4096
    """Requests that are served at once."""
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    """Requests that wait to be served; more are refused (503)."""
    waiting_timeout_seconds: Seconds = 30.0
    """How long a request waits to be served before it is refused (503)."""

    max_continuations: Annotated[int, Field(ge=0)] = 8
    """How often one request that its Decoder hands back for lack of KV blocks is continued elsewhere; 0 keeps Decoders
    from handing any back."""
    session_capacity: Annotated[int, Field(ge=1)] = 100_000
    """Sessions that are kept in memory; the least recently used are forgotten first."""
    session_idle_seconds: Seconds = 3600.0
    """How long a session is remembered without a turn."""
    traces: TraceSettings | None = None
    """Has some requests told as spans of OpenTelemetry."""
    session_names: list[Annotated[str, AfterValidator(_checked_session_name)]] = []
    """Further places where clients name their sessions, after the usual ones and in this order: headers, and paths of
    strings in the body, as `$.metadata.session`."""
    session_store: StoreUrl | None = None
    """The address of a Valkey or Redis server that keeps the sessions of several routers; without one they are kept in
    memory."""

    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 2**10
    """The largest head of a request."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * 2**20
    """The largest body of a request."""

    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most tokens that a request may ask to be made; more are refused (400). Without `default_output_tokens` it is
    also what engines are told where the client names none, but for `/v1/completions`, where engines then make 16."""
    default_output_tokens: Annotated[int | None, Field(ge=1), AfterValidator(_at_most_the_largest)] = None
    """The number of tokens that engines are told to make at most where the client names none. At most
    `max_output_tokens`, and what the model has room for."""
    max_choices: Annotated[int, Field(ge=1)] = MAX_CHOICES
    """The most choices that a request may ask for (`n`, `best_of`); more are refused (400)."""

    api_keys: Annotated[list[ApiKeySettings], AfterValidator(_each_key_once)] = []
    """Every client needs one of these, if there are any."""
    secret: SecretStr | None = None
    """Derives what keeps tenants apart. Give all replicas of a router the same; without one it is made anew at every
    start."""
    share_prefix_across_tenants: bool = False
    """Lets tenants share the engines' prefix caches; sessions stay apart."""
    engine_api_key: Annotated[SecretStr, AfterValidator(_checked_key)] | None = None
    """The key that the router shows to engines, which they were started with (`vllm serve --api-key`)."""
    forward_authorization: bool = False
    """Hands the client's Authorization header to the engines, instead of `engine_api_key`."""

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
    def bounds(self) -> Bounds:
        """How much output a request may ask for."""
        return Bounds(self.max_output_tokens, self.default_output_tokens, self.max_choices)

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
