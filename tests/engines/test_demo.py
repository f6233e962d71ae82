"""A1-A5, A8, B1, B2, B5, C1-C4: the main job on real engines, on both model runners."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["v1", "v2"])
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("demo")
    path = folder / "facts.json"
    command = [sys.executable, "-m", "schedloom", "demo", "--runner", request.param, "--json", str(path)]
    ran = subprocess.run([*command, "--logs", str(folder)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    facts = json.loads(path.read_text())
    assert facts["runner"] == request.param
    assert left_behind(str(folder)) == []
    return facts


def left_behind(text: str) -> list[str]:
    """What was killed takes a moment to end."""
    for _ in range(100):
        if not running_with(text):
            break
        time.sleep(0.1)
    return running_with(text)


def running_with(text: str) -> list[str]:
    """Command lines and environments of processes that mention ``text``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = [(process / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ")]
        except OSError:
            continue
        found += [line for line in lines if text in line]
    return found


def test_every_answer_is_exact(facts: Any) -> None:
    assert facts["exact"] is True
    assert [turn for turn in facts["turns"] if not turn["exact"]] == []
    assert len(facts["turns"]) == 13


def test_the_promised_routes_were_taken(facts: Any) -> None:
    assert facts["routes"] == {"pd": 4, "append": 8, "fallback": 1}
    assert Counter(turn["route"] for turn in facts["turns"]) == {"pd": 4, "append": 8, "fallback": 1}
    first = [turn["route"] for turn in facts["turns"] if turn["turn"] == 1]
    assert first == ["pd"] * 4


def test_an_append_computes_its_suffix_on_the_decoder_alone(facts: Any) -> None:
    for turn in facts["turns"]:
        if turn["route"] == "append":
            assert turn["computed_on_prefiller"] == 0
            assert turn["reused_tokens"] + turn["computed_on_decoder"] == turn["prompt_tokens"]
            assert turn["computed_on_decoder"] < 200


def test_ordinary_prefill_decode_computes_on_the_prefiller(facts: Any) -> None:
    for turn in facts["turns"]:
        if turn["route"] != "append":
            assert turn["computed_on_prefiller"] > turn["computed_on_decoder"]
            assert turn["reused_tokens"] == 0
