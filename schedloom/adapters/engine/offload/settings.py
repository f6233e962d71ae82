"""What an operator writes under ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ByteSize, Field, ValidationError

from schedloom.core.errors import ConfigurationError, explain
from schedloom.core.settings import StrictSettings

PATH = "kv_connector_extra_config"


class OffloadSettings(StrictSettings):
    """``host_bytes``: host memory of the whole engine, divided evenly among its workers ("8GiB", or a number).

    ``save_timeout_seconds``: a save that no worker has finished by then is given up, and its request recomputed.
    """

    host_bytes: Annotated[ByteSize, Field(gt=0)]
    save_timeout_seconds: Annotated[float, Field(gt=0)] = 30.0


def read_settings(extra: Mapping[str, Any]) -> OffloadSettings:
    """Raises ConfigurationError for the first key that does not fit."""
    try:
        return OffloadSettings.model_validate(dict(extra))
    except ValidationError as error:
        raise ConfigurationError(f"PreemptOffloadConnector: {explain(error, OffloadSettings, PATH)}") from error
