"""What router and engines say to each other: the mark, the rejection and the engine's contract."""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL_VERSION: Final = 1

CONTRACT_PATH = "/schedloom/contract"

DECLARED_EPOCH: Final = "declared"
"""The epoch of a contract that an operator wrote down, for an engine that serves none."""

DECISION_HEADER = "x-schedloom-decision"
"""Response header in which the router says how it served a request: append, pd, fallback or decode."""

RESERVED_PREFIX = "schedloom"
"""Keys with this prefix in a request are the router's; what clients send under it is dropped."""

LOCAL_ATTEMPT_KEY = "schedloom_local_attempt"
"""Key in ``vllm_xargs`` (``SamplingParams.extra_args``) with value ``PROTOCOL_VERSION``: the router's mark."""

JOB_CLASS_KEY = "job_class"
"""Key in ``vllm_xargs`` under which a client or the router names the class of work that a request belongs to."""

MOST_WORKERS: Final = 4096
"""Of an engine: others connect to each, and count for each."""

_JOB_CLASS = re.compile(r"[A-Za-z0-9_.-]{1,64}")

REJECTION_PREFIX = "schedloom:rejected:"
"""Start of the ``stop_reason`` of a request that was turned away; the policy's reason follows.

A rejection has finish reason ``stop``, zero output tokens and this stop reason. A client's own stop string can never
be taken for one, because a request that meets a stop string has output.
"""


def is_local_attempt(extra_args: dict[str, Any] | None) -> bool:
    return bool(extra_args) and extra_args.get(LOCAL_ATTEMPT_KEY) == PROTOCOL_VERSION  # type: ignore[union-attr]


def job_class(extra_args: dict[str, Any] | None) -> str | None:
    """The class of work named in a request; anything but a short plain name reads as none."""
    name = extra_args.get(JOB_CLASS_KEY) if extra_args else None
    return name if isinstance(name, str) and _JOB_CLASS.fullmatch(name) else None


class Role(str, Enum):
    """What an engine does in prefill/decode serving."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"
    NONE = "none"


class KvEndpoint(BaseModel):
    """Where other engines reach the KV connector of one data-parallel rank."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    engine_id: str
    """The id that the connector goes by among others."""
    host: str
    """The host of the connector's side channel."""
    port: Annotated[int, Field(ge=1, le=65535)]
    """The port of the connector's side channel."""
    tp_size: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 1
    """Tensor-parallel workers of the rank."""
    pp_size: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 1
    """Pipeline-parallel workers of the rank."""


class EngineContract(BaseModel):
    """What an engine promises to the router, served at ``CONTRACT_PATH`` and read on every join and restart."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    protocol: Literal[1] = PROTOCOL_VERSION
    """The version of what router and engines say to each other."""
    epoch: str = DECLARED_EPOCH
    """The engine's life: another after every start."""
    role: Role
    """Its KV role: a producer prefills, a consumer decodes."""
    models: Annotated[list[str], Field(min_length=1)]
    """The names under which it serves its model."""
    block_size: Annotated[int, Field(ge=1)]
    """Tokens in a KV block."""
    prefix_caching: bool = True
    """Whether it keeps KV to use it again."""
    chunked_prefill: bool = True
    """Whether it cuts long prompts into chunks."""
    kv_connector: str | None = None
    """The KV connector that it was started with."""
    kv_connectors: list[str] = []
    """That connector and those within it."""
    kv_lease_seconds: Annotated[float, Field(gt=0)] | None = None
    """How long a Prefiller keeps KV for a Decoder that has not pulled it."""
    kv_endpoints: list[KvEndpoint] = []
    """Where other engines reach its KV connector, in the order of ranks."""
    bidirectional_kv: bool = False
    """Whether Prefillers may pull KV back from Decoders (`bidirectional_kv_xfer`)."""
    kv_pinned_seconds: Annotated[float, Field(gt=0)] | None = None
    """How long a Decoder with `bidirectional_kv` keeps a turn's KV for a Prefiller."""
    saves_preempted_kv: bool = False
    """Whether its KV connector can save the KV of preempted requests."""
    data_parallel_size: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 1
    """The data-parallel ranks that this server reaches."""
    kv_events_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Where its first rank tells of its KV blocks; each next rank does so a port further."""
    kv_replay_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Where its first rank tells again what was missed of that; each next rank does so a port further."""
    max_model_len: int | None = None
    """Tokens of the longest prompt and answer together."""
    model_runner: Literal["v1", "v2"] | None = None
    """vLLM's model runner."""
    tool_parser: str | None = None
    """Who reads tool calls out of its output (`--tool-call-parser`)."""
    reasoning_parser: str | None = None
    """Who reads reasoning out of its output (`--reasoning-parser`)."""
    features: list[str] = []
    """The names of the policies that it was started with."""
    inactive: list[str] = []
    """Those of them that are switched off, or into shadow, now."""
    engine_version: str | None = None
    """The version of vLLM."""
    schedloom_version: str | None = None
    """The version of schedloom."""

    @property
    def can_prefill(self) -> bool:
        return self.role in (Role.PRODUCER, Role.BOTH)

    @property
    def can_decode(self) -> bool:
        return self.role in (Role.CONSUMER, Role.BOTH)
