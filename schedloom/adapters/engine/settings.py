"""Where an engine's section of configuration is read from.

Usually ``additional_config["scheduler_config"]``. Released versions of vllm-ascend refuse keys there that they do not
know, so the section can be parked in an environment variable instead, which every process of the engine inherits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from schedloom.core.config import PATH, SchedulerSection, parse_section, read_section
from schedloom.core.errors import ConfigurationError
from schedloom.core.reading import parse_json

VARIABLE = "SCHEDLOOM_SCHEDULER_CONFIG"


def engine_section(vllm_config: Any) -> SchedulerSection:
    """The section of the engine with this ``VllmConfig``.

    Raises ConfigurationError when it does not fit, and when it stands in both places.
    """
    section = read_section(vllm_config.additional_config)
    parked = os.environ.get(VARIABLE)
    if not parked:
        return section
    if section.is_on:
        raise ConfigurationError(f"policies are switched on in {PATH} and in {VARIABLE}: keep one of the two")
    return parse_section(_parse(parked))


def _parse(text: str) -> Mapping[str, Any]:
    try:
        section = parse_json(text)
    except ValueError as error:
        raise ConfigurationError(f"{VARIABLE} is not JSON: {error}") from error
    if not isinstance(section, Mapping):
        raise ConfigurationError(f"{VARIABLE} must be a JSON object, like additional_config's section")
    return section
