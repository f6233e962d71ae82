"""vLLM servers on this machine's CPUs: described by an `EngineSpec`, run by a `Fleet`, never left behind."""

import contextlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

HOST = "127.0.0.1"
UNWANTED_VARIABLES = ("VLLM_CPU_KVCACHE_SPACE", "PYTHONDONTWRITEBYTECODE")
KEEPER = Path(__file__).with_name("keeper.py")
POLL_SECONDS = 0.1
LOG_LINES_IN_ERRORS = 30
EXCEPTION = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:ERROR [^]]+\] )?(?:\w+\.)*(\w+(?:Error|Exception): .+)", re.MULTILINE)

Role = Literal["producer", "consumer", "none"]
Runner = Literal["v1", "v2"]
OnReady = Callable[["Engine", float], None]


class EngineFailed(Exception):
    """An engine ended, or was not ready in time; carries the last lines of its log."""


@dataclass(frozen=True)
class EngineSpec:
    """One vLLM server: its place in the fleet and the settings that differ from the demo's common ones."""

    name: str
    port: int
    """HTTP, on 127.0.0.1."""
    role: Role = "none"
    """Producers hand KV over and consumers pull it, both by NIXL; `none` has no KV connector."""
    side_channel_port: int = 0
    """NIXL's handshake; data-parallel rank i uses this plus i. Needed unless the role is `none`."""
    runner: Runner = "v1"
    cores: tuple[int, ...] = ()
    """Processor cores the server may use; empty for any."""
    block_size: int = 32
    """Tokens in one KV block; must be the same on both sides of a transfer."""
    kv_cache_bytes: int = 128 << 20
    max_model_len: int = 8192
    connector: str = "NixlConnector"
    """The KV connector of a role that transfers KV; `connector_config` is its extra configuration."""
    connector_config: Mapping[str, Any] = field(default_factory=dict)
    kv_lease_seconds: int = 30
    """How long a producer keeps KV that nobody has pulled."""
    additional_config: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """Further arguments of the server, after all others, so that they win."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError if a role that transfers KV has no side channel."""
        if self.role != "none" and not self.side_channel_port:
            raise ValueError(f"Engine {self.name} is a {self.role} and needs a side_channel_port.")

    def command(self, model: Path) -> list[str]:
        """The command line of a server for the model in folder `model`, which is served as `demo`."""
        options = {
            "model": model,
            "served-model-name": "demo",
            "host": HOST,
            "port": self.port,
            "dtype": "float32",
            "block-size": self.block_size,
            "kv-cache-memory-bytes": self.kv_cache_bytes,
            "max-model-len": self.max_model_len,
            **self._json_options(),
        }
        switches = [
            "--enforce-eager",
            "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
            "--disable-uvicorn-access-log",
        ]
        pairs = [f"--{name}={value}" for name, value in options.items()]
        return [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *pairs,
            *switches,
            *self.arguments,
        ]

    def full_environment(self) -> dict[str, str]:
        """This process's environment with what vLLM needs on a CPU: see docs/cpu-engines.md."""
        inherited = {name: value for name, value in os.environ.items() if name not in UNWANTED_VARIABLES}
        return {
            **inherited,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRITON_INTERPRET": "1",
            "UCX_TLS": "tcp,self,sm",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1" if self.runner == "v2" else "0",
            **self.environment,
        }

    def _json_options(self) -> dict[str, str]:
        options: dict[str, Any] = {}
        if self.role != "none":
            options["kv-transfer-config"] = {
                "kv_connector": self.connector,
                "kv_role": f"kv_{self.role}",
                "kv_connector_extra_config": {"kv_lease_duration": self.kv_lease_seconds, **self.connector_config},
            }
        if self.additional_config:
            options["additional-config"] = dict(self.additional_config)
        return {name: json.dumps(value) for name, value in options.items()}


class Engine:
    """A running server. Ends when `stop` is called and whenever this process ends, by whatever means."""

    def __init__(self, spec: EngineSpec, model: Path, log: Path) -> None:
        """Starts the server, which writes to `log`; returns at once."""
        self.spec = spec
        self.log = log
        self.url = f"http://{HOST}:{spec.port}"
        self.process = keep(spec.command(model), log, cores=spec.cores, environment=spec.full_environment())

    def is_ready(self) -> bool:
        """Whether the server answers its health check. Raises EngineFailed if it has ended."""
        status = self.process.poll()
        if status is not None:
            raise self.failure(f"ended with status {status}")
        connection = http.client.HTTPConnection(HOST, self.spec.port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return connection.getresponse().status == HTTPStatus.OK
        return False

    def failure(self, what: str) -> EngineFailed:
        """An error that says `what` happened to this engine, with the errors in its log and the log's end."""
        text = self.log.read_text(errors="replace")
        errors = dict.fromkeys(match[1] for match in EXCEPTION.finditer(text))
        end = text.splitlines()[-LOG_LINES_IN_ERRORS:]
        return EngineFailed("\n".join([f"Engine {self.spec.name} {what}.", *errors, f"End of {self.log}:", *end]))

    def stop(self) -> None:
        """Ends the server and everything it started, and waits until they are gone."""
        stop(self.process)


class Fleet:
    """Engines that start together and end together: `with Fleet(specs, model, logs) as fleet: ...`."""

    def __init__(
        self,
        specs: Iterable[EngineSpec],
        model: Path,
        logs: Path,
        on_ready: OnReady = lambda engine, seconds: None,
        patience_seconds: float = 180.0,
    ) -> None:
        """`on_ready(engine, seconds)` is called as each engine becomes ready; logs go to `logs`/NAME.log."""
        self.engines: dict[str, Engine] = {}
        self._specs = tuple(specs)
        self._model = model
        self._logs = logs
        self._on_ready = on_ready
        self._patience_seconds = patience_seconds

    def __enter__(self) -> "Fleet":
        """Starts every engine and waits for all. Raises EngineFailed if one fails, and leaves none running."""
        try:
            self.start(*self._specs)
        except BaseException:
            self.stop(*self.engines)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends every engine."""
        self.stop(*self.engines)

    def start(self, *specs: EngineSpec) -> None:
        """Adds engines and waits until they are ready. Raises EngineFailed."""
        self._logs.mkdir(parents=True, exist_ok=True)
        for spec in specs:
            self.engines[spec.name] = Engine(spec, self._model, self._logs / f"{spec.name}.log")
        self._wait_until_ready([self.engines[spec.name] for spec in specs])

    def stop(self, *names: str) -> None:
        """Ends the named engines and takes them out of the fleet."""
        stop(*(self.engines.pop(name).process for name in names))

    def _wait_until_ready(self, waiting: list[Engine]) -> None:
        started = time.monotonic()
        while waiting:
            ready = [engine for engine in waiting if engine.is_ready()]
            elapsed = time.monotonic() - started
            for engine in ready:
                self._on_ready(engine, elapsed)
            waiting = [engine for engine in waiting if engine not in ready]
            if waiting and elapsed > self._patience_seconds:
                raise waiting[0].failure(f"was not ready after {elapsed:.0f} s")
            time.sleep(POLL_SECONDS)


def keep(
    command: Sequence[str],
    log: Path,
    *,
    cores: Iterable[int] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `command`, with its output in `log`, so that it ends when this process does: see keeper.py."""
    keeper = [sys.executable, "-I", str(KEEPER), ",".join(map(str, cores)), *command]
    with log.open("wb") as output:
        return subprocess.Popen(
            keeper,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def stop(*kept: subprocess.Popen[bytes]) -> None:
    """Ends commands started by `keep`, all at the same time, and waits until they are gone."""
    for process in kept:
        if process.stdin:
            process.stdin.close()
    for process in kept:
        process.wait()


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports that are free now, outside the range that systems take for outgoing connections."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(range(20000, 32000), 2000):
            if len(ports) == count:
                break
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server((HOST, port)))
                ports.append(port)
    return ports
