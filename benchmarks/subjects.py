"""What the router's benchmark runs: mock engines and clients built from ``load``, routers, and the CPU they take."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "bench"
PEER = "vllm-router==0.1.17"
KEY = "the-key-of-the-benchmark"
CORES = sorted(os.sched_getaffinity(0))
ROUTERS_CORE, LOADS_CORE = CORES[0], CORES[-1]
BOTH = {ROUTERS_CORE, LOADS_CORE}


@dataclass(frozen=True)
class Load:
    """What a client does: ``rate`` 0 asks again as soon as it is answered. Times are seconds, the body's size bytes."""

    connections: int
    seconds: float
    tokens: int = 16
    stream: bool = False
    body: int = 1024
    rate: float = 0.0
    warm: float = 0.7
    ramp: float = 0.0
    deadline: float = 0.0

    def arguments(self, port: int) -> list[str]:
        times = [round(self.ramp * 1e6), int(self.stream), self.tokens, self.body, round(self.deadline * 1e6)]
        told = [port, self.connections, self.rate, self.seconds, self.warm, *times]
        return [*map(str, told), f"Authorization: Bearer {KEY}\r\n"]


@dataclass(frozen=True)
class Measured:
    """What a client told, and the CPU seconds and growth in resident bytes of who served it."""

    told: dict[str, Any]
    cpu: float
    grown: int

    @property
    def per_cpu_second(self) -> float:
        return float(self.told["ok"]) / self.cpu

    @property
    def cpu_of_an_event(self) -> float:
        return self.cpu / float(self.told["events"])

    @property
    def errors(self) -> int:
        return sum(int(self.told[kind]) for kind in ("late", "refused", "failed", "unsent"))


@dataclass(frozen=True)
class Subject:
    """Something that serves at ``port``."""

    port: int
    pid: int

    def measure(self, load: Load) -> Measured:
        command = _on({LOADS_CORE}, [f"{BUILD}/client", *load.arguments(self.port)])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            if client.stdout.readline() != "measuring\n":
                raise RuntimeError(f"the client ended before it measured: {' '.join(command)}")
            cpu, resident = cpu_seconds(self.pid), resident_bytes(self.pid)
            told = json.loads(client.stdout.readline())
            return Measured(told, cpu_seconds(self.pid) - cpu, resident_bytes(self.pid) - resident)


def build_load() -> None:
    """The mock engine and the client."""
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in ("engine", "client"):
        source = ROOT / "benchmarks" / "load" / f"{name}.c"
        subprocess.run(["gcc", "-O2", "-o", str(BUILD / name), str(source)], check=True)


def installed(package: str) -> Path:
    """Where the programs of ``package`` are, in an environment of its own that is made when it is not there."""
    return _environment(package, sys.executable, package)


@functools.cache
def routers_python() -> str:
    """What the router runs on: this interpreter, or the one that ROUTER_PYTHON names, in an environment of its own."""
    chosen = os.environ.get("ROUTER_PYTHON")
    if not chosen:
        return sys.executable
    return str(_environment(f"router{chosen.replace('/', '-')}", chosen, "--editable", str(ROOT)) / "python")


def _environment(name: str, python: str, *packages: str) -> Path:
    place = BUILD / name
    if not (place / "complete").exists():
        print(f"installing {name} ...", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        subprocess.run([*pip, *packages], check=True)
        (place / "complete").touch()
    return place / "bin"


@contextmanager
def engines(count: int, interval: float = 0.0, service: float = 0.0) -> Iterator[list[int]]:
    """The ports of mock engines: ``interval`` seconds between two events, only the last takes ``service`` seconds."""
    with ExitStack() as stack:
        ports = free_ports(count)
        for port in ports:
            wait = service if port == ports[-1] else 0.0
            command = [f"{BUILD}/engine", str(port), str(round(interval * 1e6)), str(round(wait * 1e6))]
            stack.enter_context(running(command, {LOADS_CORE}))
            wait_for_port(port)
        yield ports


@contextmanager
def direct(interval: float = 0.0) -> Iterator[Subject]:
    """A mock engine without a router."""
    (port,) = free_ports(1)
    with running([f"{BUILD}/engine", str(port), str(round(interval * 1e6)), "0"], {LOADS_CORE}) as process:
        wait_for_port(port)
        yield Subject(port, process.pid)


@contextmanager
def schedloom(
    interval: float = 0.0, service: float = 0.0, cores: set[int] | None = None, **settings: Any
) -> Iterator[Subject]:
    """This project's router as a user starts it: authentication, sessions, breakers, deadlines, figures are on, and
    one request in a hundred is traced."""
    with engines(2, interval, service) as ports:
        (port,) = free_ports(1)
        file = BUILD / "router.json"
        file.write_text(json.dumps(_settings(port, ports) | settings))
        command = [routers_python(), "-m", "schedloom", "route", "--config", str(file), "--log-level", "ERROR"]
        with running(command, cores or {ROUTERS_CORE}) as process:
            wait_for_word("is ready", BUILD / f"{Path(command[0]).name}.log")
            wait_for_answer(port)
            yield Subject(port, process.pid)


@contextmanager
def peer(interval: float = 0.0) -> Iterator[Subject]:
    """vllm-router in its mode for Prefillers and Decoders."""
    with engines(2, interval) as (prefiller, decoder):
        port, metrics = free_ports(2)
        command = f"{installed(PEER)}/vllm-router --vllm-pd-disaggregation --policy consistent_hash --log-level error"
        fleet = f"--prefill http://127.0.0.1:{prefiller} none --decode http://127.0.0.1:{decoder}"
        own = f"--host 127.0.0.1 --port {port} --prometheus-port {metrics}"
        with running([*command.split(), *fleet.split(), *own.split()], {ROUTERS_CORE}) as process:
            wait_for_answer(port)
            yield Subject(port, process.pid)


def _settings(port: int, engines: Sequence[int]) -> dict[str, Any]:
    common = {"models": ["m"], "block_size": 16, "kv_lease_seconds": 30.0, "features": ["append_prefill"]}
    workers = [
        {"url": f"http://127.0.0.1:{engine}", "contract": common | {"role": role}}
        for engine, role in zip(engines, ("producer", "consumer"), strict=True)
    ]
    keys = [{"key": KEY, "tenant": "benchmark"}]
    traces = {"endpoint": f"http://127.0.0.1:{engines[0]}/v1/traces", "ratio": 0.01}
    options = {"enable_decoder_append_prefill": True, "api_keys": keys, "traces": traces}
    return {"port": port, "workers": workers} | options


@contextmanager
def running(command: Sequence[str], cores: set[int]) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose words go to a file. Raises RuntimeError when it has ended before it is told to."""
    with (BUILD / f"{Path(command[0]).name}.log").open("wb") as words:
        process = subprocess.Popen(_on(cores, command), stdout=words, stderr=words, cwd=ROOT)
        try:
            yield process
            if process.poll() is not None:
                raise RuntimeError(f"it ended by itself; {words.name} says why")
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _on(cores: set[int], command: Sequence[str]) -> list[str]:
    return ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_for_port(port: int) -> None:
    _until(lambda: socket.create_connection(("127.0.0.1", port), 1).close(), f"nobody listens on port {port}")


def wait_for_word(word: str, log: Path) -> None:
    """A router of several processes answers before all of them do."""

    def look() -> None:
        if word not in log.read_text(errors="replace"):
            raise OSError("not yet")

    _until(look, f"{log} never says that it {word}")


def wait_for_answer(port: int) -> None:
    body = {"model": "m", "max_tokens": 2, "stream": False, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    _until(lambda: urllib.request.urlopen(request, timeout=5).read(), f"nobody answers on port {port}")


def _until(works: Any, otherwise: str) -> None:
    for attempt in range(600):
        try:
            works()
            return
        except OSError as error:
            otherwise = f"{otherwise}: {error}" if attempt == 599 else otherwise
            time.sleep(0.1)
    raise RuntimeError(otherwise)


def cpu_seconds(pid: int) -> float:
    """Of all threads and of all children."""
    return sum(_cpu_of(Path(f"/proc/{pid}/task/{thread}")) for thread in os.listdir(f"/proc/{pid}/task"))


def _cpu_of(thread: Path) -> float:
    own = int((thread / "schedstat").read_text().split()[0]) / 1e9
    return own + sum(cpu_seconds(int(child)) for child in (thread / "children").read_text().split())


def resident_bytes(pid: int) -> int:
    """Of the process and all its children."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return pages * os.sysconf("SC_PAGESIZE") + sum(resident_bytes(int(child)) for child in children)
