"""The engine's section of configuration: ``additional_config["scheduler_config"]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from schedloom.core.composition import PolicyChoice, explain
from schedloom.core.errors import ConfigurationError

SECTION = "scheduler_config"


class SchedulerSection(BaseModel):
    """What an operator writes.

    ``decoder_append_prefill_enable`` switches on ``append_prefill`` with its defaults; ``policies`` is the general
    form and carries settings: ``[{"name": "append_prefill", "max_append_tokens": 4096}]``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    decoder_append_prefill_enable: bool = False
    policies: list[PolicyChoice] = []

    @property
    def choices(self) -> list[PolicyChoice]:
        """The policies that are on, switches and general form together."""
        named = {choice.name for choice in self.policies}
        if self.decoder_append_prefill_enable and "append_prefill" not in named:
            return [PolicyChoice(name="append_prefill"), *self.policies]
        return list(self.policies)


def read_section(additional_config: Any) -> SchedulerSection:
    """The section of an engine's ``additional_config``.

    A section in which nothing of ours is on is somebody else's business and reads as empty, whatever else it holds.
    Raises ConfigurationError when something is on and the section does not fit.
    """
    section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
    if not isinstance(section, Mapping) or not _switches_on(section):
        return SchedulerSection()
    try:
        return SchedulerSection.model_validate(dict(section))
    except ValidationError as error:
        raise ConfigurationError(f"additional_config.{SECTION}: {explain(error, SchedulerSection)}") from error


def _switches_on(section: Mapping[str, Any]) -> bool:
    return any(section.get(key) for key in SchedulerSection.model_fields)
