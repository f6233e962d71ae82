"""What the router costs and bears, as ratios to vllm-router and to no router at all in the same run.

python -m benchmarks.router [--quick] [--json PATH] [FIGURE ...]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.subjects import BOTH, Load, Measured, Subject, build_load, direct, peer, schedloom

Start = Callable[[], AbstractContextManager[Subject]]
Figures = dict[str, float]

PATIENCE: Final = 1.0
"""Seconds after which an answer is too late to be of use."""


@dataclass(frozen=True)
class Pace:
    """How much of everything: rounds are interleaved, so that a busy moment meets all subjects."""

    rounds: int
    seconds: float
    soak_seconds: float

    def of(self, load: Load) -> Load:
        return replace(load, seconds=self.seconds)


FULL: Final = Pace(rounds=5, seconds=4, soak_seconds=60)
QUICK: Final = Pace(rounds=1, seconds=1.5, soak_seconds=8)


def interleaved(pace: Pace, load: Load, *subjects: Start) -> list[list[Measured]]:
    """What each subject was measured at, round by round."""
    rounds = [[_measured(subject, pace.of(load)) for subject in subjects] for _ in range(pace.rounds)]
    return [list(column) for column in zip(*rounds, strict=True)]


def _measured(subject: Start, load: Load) -> Measured:
    with subject() as running:
        return running.measure(load)


def _median(measured: list[Measured], of: Callable[[Measured], float]) -> float:
    return median(map(of, measured))


def _requests(pace: Pace, load: Load, name: str) -> Figures:
    """Requests by Prefiller and Decoder, for each second of the router's CPU."""
    ours, theirs = interleaved(pace, load, schedloom, peer)
    own, other = (_median(measured, lambda one: one.per_cpu_second) for measured in (ours, theirs))
    failed = sum(one.errors for one in ours)
    return {name: own / other, f"{name}_per_cpu_second": own, f"{name}_errors": failed}


def pd_1kb(pace: Pace) -> Figures:
    return _requests(pace, Load(32, 0), "pd_1kb")


def pd_50kb(pace: Pace) -> Figures:
    return _requests(pace, Load(16, 0, body=50 * 1024), "pd_50kb")


def chunk(pace: Pace) -> Figures:
    """CPU for each event of 500 streams that send one each 20 ms."""
    load = Load(500, 0, tokens=200, stream=True, warm=3, ramp=0.002)
    ours, theirs = interleaved(pace, load, lambda: schedloom(0.02), lambda: peer(0.02))
    own, other = (_median(measured, lambda one: one.cpu_of_an_event) for measured in (ours, theirs))
    return {"chunk": own / other, "chunk_us": own * 1e6}


def burst(pace: Pace) -> Figures:
    """How late events come of which 64 are sent at once."""
    load = Load(4, 0, tokens=64, stream=True)
    ours, without = interleaved(pace, load, schedloom, direct)
    own, other = (_median(measured, lambda one: one.told["event_p50"]) for measured in (ours, without))
    return {"burst": own / other, "burst_us": own}


def ttft(pace: Pace) -> Figures:
    """What a router adds to the time to the first event, at one connection."""
    load = Load(1, 0, tokens=2, stream=True)
    ours, theirs, without = interleaved(pace, load, schedloom, peer, direct)
    own, other, none = (_median(measured, lambda one: one.told["first_p50"]) for measured in (ours, theirs, without))
    return {"ttft": (own - none) / (other - none), "ttft_added_us": own - none}


def soak(pace: Pace) -> Figures:
    """2,000 streams of 20 tokens a second each."""
    load = Load(2000, pace.soak_seconds, tokens=1200, stream=True, warm=10, ramp=0.002)
    one = _measured(lambda: schedloom(0.05), load)
    expected = 2000 * 20 * pace.soak_seconds
    return {
        "soak_errors": one.errors,
        "soak_grown_mib": one.grown / 2**20,
        "soak_events": one.told["events"] / expected,
        "soak_event_p99_us": one.told["event_p99"],
    }


def goodput(pace: Pace) -> Figures:
    """What is served in time of twice as many requests as can be: by the engines, and by the router itself, which lets
    all of them in, or few."""
    subjects = {
        "goodput_2x": slow_engines,
        "goodput_2x_of_the_router": schedloom,
        "goodput_2x_of_the_router_tight": few_at_once,
    }
    return {name: median(_at_twice_the_load(one, pace) for _ in range(pace.rounds)) for name, one in subjects.items()}


def slow_engines() -> AbstractContextManager[Subject]:
    """Engines that serve 250 requests a second, and a router that keeps no more than they serve in time."""
    return schedloom(service=0.004, max_in_flight=100, max_waiting=50)


def few_at_once() -> AbstractContextManager[Subject]:
    return schedloom(max_in_flight=256, max_waiting=64)


def _at_twice_the_load(subject: Start, pace: Pace) -> float:
    with subject() as running:
        peak = _served(running.measure(pace.of(Load(128, 0, deadline=PATIENCE))))
        return _served(running.measure(pace.of(Load(4000, 0, rate=2 * peak, warm=5, deadline=PATIENCE)))) / peak


def _served(one: Measured) -> float:
    return float(one.told["ok"]) / float(one.told["seconds"])


def workers(pace: Pace) -> Figures:
    """What each CPU second is worth when two processes share the work, compared with one."""
    one, two = interleaved(pace, Load(64, 0), lambda: schedloom(cores=BOTH), lambda: schedloom(cores=BOTH, processes=2))
    alone, shared = (_median(measured, lambda each: each.per_cpu_second) for measured in (one, two))
    return {"workers_2": shared / alone, "workers_2_served": _median(two, _served) / _median(one, _served)}


FIGURES: Final = {figure.__name__: figure for figure in (pd_1kb, pd_50kb, chunk, burst, ttft, soak, goodput, workers)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__.partition("\n")[0])
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}; all when left out")
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    build_load()
    found: Figures = {}
    for name in given.figures or FIGURES:
        for figure, value in FIGURES[name](QUICK if given.quick else FULL).items():
            found[figure] = round(value, 4)
            print(f"{figure:24} {value:12,.3f}")
            sys.stdout.flush()
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
