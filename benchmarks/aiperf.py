"""aiperf, a load tool of the field, run against the router: sessions of several turns, each with its header.

python -m benchmarks.aiperf [--engines real] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.subjects import BUILD, build_load, installed, schedloom
from schedloom.demo.engines import Fleet
from schedloom.demo.model import cached_model
from schedloom.demo.scenario import engine_specs, started_router

TOOL: Final = "aiperf==0.13.0"
SESSIONS: Final = 12
TURNS: Final = 4
OPTIONS: Final = (
    f"--endpoint-type chat --streaming --session-header X-Session-ID --num-conversations {SESSIONS} "
    f"--conversation-turn-mean {TURNS} --conversation-turn-stddev 0 --concurrency 4 --prompt-input-tokens-mean 400 "
    "--prompt-output-tokens-mean 16 --extra-inputs ignore_eos:true --random-seed 1 --ui none --no-gpu-telemetry "
    "--no-server-metrics"
)
"""The first turn of a session goes by a Prefiller, those after it by its Decoder."""


@contextmanager
def before_mock_engines() -> Iterator[tuple[str, str]]:
    build_load()
    with schedloom(interval=0.005, api_keys=[]) as router:
        yield f"http://127.0.0.1:{router.port}", "m"


@contextmanager
def before_real_engines() -> Iterator[tuple[str, str]]:
    """The demo's Prefiller and Decoder, which move KV by NIXL on this machine's CPUs."""
    logs = Path(tempfile.mkdtemp(prefix="schedloom-aiperf-"))
    print(f"starting two engines (logs in {logs})", flush=True)
    with ExitStack() as stack:
        engines = stack.enter_context(Fleet(engine_specs("v1")[:2], cached_model(), logs)).engines
        yield stack.enter_context(started_router(engines["prefiller"], engines["decoder"], logs)), "demo"


def aiperf(url: str, model: str) -> dict[str, Any]:
    """The figures that the tool found. Raises CalledProcessError when it failed."""
    with tempfile.TemporaryDirectory() as results:
        named = ["--url", url, "--model", model, "--tokenizer", str(cached_model()), "--output-artifact-dir", results]
        command = [str(installed(TOOL) / "aiperf"), "profile", *OPTIONS.split(), *named]
        log = BUILD / "aiperf.log"
        with log.open("wb") as words:
            subprocess.run(command, stdout=words, stderr=words, check=True)
        found: dict[str, Any] = json.loads((Path(results) / "profile_export_aiperf.json").read_text())
        return found


def decisions(url: str) -> dict[str, int]:
    """How many requests the router served by which route."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        lines = re.findall(r'requests_total{outcome="served",route="(\w+)"} (\S+)', page.read().decode())
    return {route: round(float(count)) for route, count in lines}


def measure(real: bool) -> dict[str, Any]:
    with (before_real_engines if real else before_mock_engines)() as (url, model):
        before = decisions(url)
        found = aiperf(url, model)
        after = decisions(url)
    seconds = {name: found[name]["p50"] for name in ("time_to_first_token", "inter_token_latency", "request_latency")}
    return {
        "requests": round(found["request_count"]["avg"]),
        "errors": round(found.get("error_request_count", {}).get("avg", 0)),
        **{route: count - before.get(route, 0) for route, count in after.items()},
        **{f"{name}_p50_ms": round(value, 2) for name, value in seconds.items()},
        "requests_per_second": round(found["request_throughput"]["avg"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aiperf", description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", choices=("mock", "real"), default="mock")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    given = parser.parse_args()
    figures = measure(given.engines == "real")
    for name, value in figures.items():
        print(f"{name:30} {value:>10}")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    if figures["errors"] or figures["requests"] != SESSIONS * TURNS:
        sys.exit(f"not all of {SESSIONS * TURNS} requests were answered")


if __name__ == "__main__":
    main()
