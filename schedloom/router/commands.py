"""``schedloom route``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from schedloom.core.errors import CalledWrongly, ConfigurationError
from schedloom.router.hangup import hangups
from schedloom.router.settings import BY_OPTIONS, RouterSettings, read_file, router_settings


class LogLevel(str, Enum):
    """Python's levels."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


def route(
    prefill: Annotated[list[str] | None, typer.Option(help="A Prefiller, as URL or NAME=URL; may be repeated.")] = None,
    decode: Annotated[list[str] | None, typer.Option(help="A Decoder, as URL or NAME=URL; may be repeated.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.  [default: 9000]")] = None,
    enable_decoder_append_prefill: Annotated[
        bool,
        typer.Option(
            "--enable-decoder-append-prefill",
            help="Try follow-up turns of a session on the Decoder that holds its KV.",
        ),
    ] = False,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; options win.")] = None,
    wait: Annotated[float | None, typer.Option(help="Seconds to wait for engines.  [default: 0]")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that serve.  [default: 1]")] = None,
    log_level: Annotated[
        LogLevel, typer.Option(help="Least severe messages to log.", case_sensitive=False)
    ] = LogLevel.INFO,
) -> None:
    """Route requests to Prefillers and Decoders."""
    hangups.heed()
    from schedloom.router.logs import configure_logging
    from schedloom.router.processes import supervise
    from schedloom.router.serve import run

    configure_logging(log_level.value)
    given = _given(host=host, port=port, start_wait_seconds=wait, processes=workers)
    if enable_decoder_append_prefill:
        given["enable_decoder_append_prefill"] = True
    named = _workers(prefill or [], "prefill") + _workers(decode or [], "decode")
    if named or config is None:
        given["workers"] = named
    try:
        if config is None and not (prefill and decode):
            raise CalledWrongly("give --prefill URL and --decode URL, each at least once, or --config FILE")
        settings = _settings(config, given)
        (run if settings.processes == 1 else supervise)(settings, lambda: _again(config, given))
    except ConfigurationError as error:
        for sentence in error.sentences:
            typer.echo(f"schedloom: {sentence}", err=True)
        raise typer.Exit(error.status) from error


def _settings(config: Path | None, given: dict[str, object]) -> RouterSettings:
    file = {} if config is None else read_file(config)
    return router_settings(file | given, config or "router configuration")


def _again(config: Path | None, given: dict[str, object]) -> RouterSettings:
    """As the file says by now."""
    if config is None:
        raise ConfigurationError("there is no file to read; name the engines in one, and start with --config FILE")
    if "workers" in given:
        raise ConfigurationError(f"the engines are those of {BY_OPTIONS}; name them in {config} alone")
    return _settings(config, given)


def _given(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


def _workers(given: list[str], role: str) -> list[dict[str, str]]:
    return [_named(engine) | {"role": role} for engine in given]


def _named(engine: str) -> dict[str, str]:
    """NAME=URL, or a URL, which may have a '=' only behind its slashes."""
    name, equals, url = engine.partition("=")
    return {"name": name, "url": url} if equals and "/" not in name else {"url": engine}
