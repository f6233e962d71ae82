"""The engine's section of configuration: ``additional_config["scheduler_config"]``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from pydantic import ValidationError

from schedloom.core.composition import ChoosingSettings, PolicyChoice
from schedloom.core.errors import ConfigurationError, as_key, explain
from schedloom.core.transfer_peers import TransferPeer

SECTION: Final = "scheduler_config"
PATH: Final = f"additional_config.{SECTION}"

SWITCHES: Final = {
    "decoder_append_prefill_enable": "append_prefill",
    "recompute_scheduler_enable": "recompute",
}
"""Keys that switch one policy on with its defaults."""

VLLM_OPTIONS: Final = frozenset(
    {
        "data_parallel_size",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_transfer_config",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "model",
        "scheduling_policy",
        "served_model_name",
        "tensor_parallel_size",
    }
)
"""Options that most of vLLM's own configuration files hold one of, and no other file."""

_MISSPELLED: Final = 0.7
"""How alike a key must be to one of ours to be taken for it (``difflib``'s ratio)."""

_OUR_WORDS: Final = ("append_prefill", "recompute")
"""Nobody names one of these in a key and means something else."""


class SchedulerSection(ChoosingSettings):
    """What an operator writes."""

    decoder_append_prefill_enable: bool = False
    """Switches `append_prefill` on, with its defaults unless `policies` names it."""
    recompute_scheduler_enable: bool = False
    """Switches `recompute` on, in the same way."""
    policies: list[PolicyChoice] = []
    """Policies by name, each with its settings beside the name. Order means nothing."""
    transfer_peers: list[TransferPeer] = []
    """The engine moves KV with these only: each is where another engine's KV connector is reached, `host:port`, or
    `host` for every port of it. Without any it moves KV with anybody."""

    @property
    def switches(self) -> Mapping[str, str]:
        return SWITCHES

    @property
    def is_on(self) -> bool:
        """Whether it asks anything of the engine."""
        return bool(self.choices or self.transfer_peers)

    @property
    def choices(self) -> list[PolicyChoice]:
        """The policies that are on, general form and switches together."""
        chosen = [choice.at(f"{PATH}.policies[{place}]") for place, choice in enumerate(self.policies)]
        named = {choice.name for choice in chosen}
        switched = {key: name for key, name in SWITCHES.items() if getattr(self, key) and name not in named}
        return chosen + [PolicyChoice(name=name).at(f"{PATH}.{key}") for key, name in switched.items()]


def engine_key(values: Mapping[Any, Any]) -> str | None:
    """The key that shows ``values`` to be an engine's configuration file and no router's, if there is one."""
    if values.get("kind") == "router" or "workers" in values:
        return None
    if values.get("kind") == "engine":
        return "kind"
    telling = {*VLLM_OPTIONS, *SWITCHES, "additional_config", SECTION}
    return next((key for key in values if isinstance(key, str) and key.replace("-", "_") in telling), None)


def read_section(additional_config: Any) -> SchedulerSection:
    """The section of an engine's ``additional_config``.

    A section in which nothing of ours is on is somebody else's business and reads as empty, whatever else it holds,
    but for a key that is one of ours misspelled. Raises ConfigurationError for such a key, and when something is on
    and the section does not fit.
    """
    if not isinstance(additional_config, Mapping):
        return SchedulerSection()
    refuse_misplaced(additional_config)
    section = additional_config.get(SECTION)
    if not isinstance(section, Mapping) or not _switches_on(section):
        return SchedulerSection()
    return parse_section(section)


def refuse_misplaced(additional_config: Mapping[Any, Any]) -> None:
    """Raises ConfigurationError for what was surely meant to be our section, or in it, and is not."""
    section = additional_config.get(SECTION)
    if section and not isinstance(section, Mapping) and _mentions_us(section):
        raise ConfigurationError(f"{PATH}: must be a mapping")
    for key, value in additional_config.items():
        if _is_section(key, value):
            raise ConfigurationError(f"unknown key 'additional_config.{key}'; did you mean {SECTION!r}?")
        if value and "append_prefill" in as_key(key):
            raise ConfigurationError(f"unknown key 'additional_config.{key}'; write it inside {SECTION}")


def _is_section(key: object, value: object) -> bool:
    """Whether ``value`` has what only our section has, under a name that is only nearly ours."""
    if key == SECTION or not isinstance(value, Mapping):
        return False
    is_ours = any(value.get(known) for known in SchedulerSection.model_fields)
    return is_ours and bool(get_close_matches(as_key(key), [SECTION], cutoff=_MISSPELLED))


def _mentions_us(section: object) -> bool:
    return any(word in repr(section) for word in (*SWITCHES, "policies", "'name'"))


def parse_section(section: Mapping[str, Any]) -> SchedulerSection:
    """Raises ConfigurationError for the first key that does not fit."""
    try:
        return SchedulerSection.model_validate(dict(section))
    except ValidationError as error:
        raise ConfigurationError(explain(error, SchedulerSection, PATH)) from error


def _switches_on(section: Mapping[str, Any]) -> bool:
    known = SchedulerSection.model_fields
    return any(value and (key in known or _is_near(key, known)) for key, value in section.items())


def _is_near(key: object, known: Iterable[str]) -> bool:
    plain = as_key(key)
    return bool(get_close_matches(plain, known, n=1, cutoff=_MISSPELLED)) or any(word in plain for word in _OUR_WORDS)
