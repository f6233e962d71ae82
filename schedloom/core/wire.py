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

    model_config = ConfigDict(frozen=True)

    engine_id: str
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    tp_size: Annotated[int, Field(ge=1)] = 1
    pp_size: Annotated[int, Field(ge=1)] = 1


class EngineContract(BaseModel):
    """What an engine promises to the router, served at ``CONTRACT_PATH`` and read on every join and restart.

    ``epoch`` differs after every start of the engine. ``kv_lease_seconds`` is how long a Prefiller keeps KV for a
    Decoder that has not pulled it; ``kv_pinned_seconds`` how long a Decoder with ``bidirectional_kv`` keeps a turn's KV
    for a Prefiller. ``kv_endpoints`` are in the order of ranks. ``data_parallel_size`` counts the ranks that this
    server reaches. At ``kv_events_port`` its first rank tells of its KV blocks, and at ``kv_replay_port`` again what
    was missed; each next rank does so a port further. ``features`` are the names of the policies that the engine was
    started with, ``inactive`` those of them that are switched off, or into shadow, now.
    """

    model_config = ConfigDict(frozen=True)

    protocol: Literal[1] = PROTOCOL_VERSION
    epoch: str = DECLARED_EPOCH
    role: Role
    models: Annotated[list[str], Field(min_length=1)]
    block_size: Annotated[int, Field(ge=1)]
    prefix_caching: bool = True
    chunked_prefill: bool = True
    kv_connector: str | None = None
    kv_connectors: list[str] = []
    kv_lease_seconds: Annotated[float, Field(gt=0)] | None = None
    kv_endpoints: list[KvEndpoint] = []
    bidirectional_kv: bool = False
    kv_pinned_seconds: Annotated[float, Field(gt=0)] | None = None
    saves_preempted_kv: bool = False
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    kv_events_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    kv_replay_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    max_model_len: int | None = None
    model_runner: Literal["v1", "v2"] | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    features: list[str] = []
    inactive: list[str] = []
    engine_version: str | None = None
    schedloom_version: str | None = None

    @property
    def can_prefill(self) -> bool:
        return self.role in (Role.PRODUCER, Role.BOTH)

    @property
    def can_decode(self) -> bool:
        return self.role in (Role.CONSUMER, Role.BOTH)
