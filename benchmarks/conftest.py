"""Options of the benchmarks, and where their figures go."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

Figures = dict[str, float]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="write the figures of this run to a JSON file")


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    """Figures by name; printed at the end, and written where ``--figures`` says."""
    collected: Figures = {}
    yield collected
    text = json.dumps(collected, indent=1)
    print(f"\n{text}")
    if path := request.config.getoption("--figures"):
        path.write_text(text + "\n")
