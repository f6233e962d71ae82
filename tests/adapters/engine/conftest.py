from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs an engine: install schedloom[cpu]")

from schedloom.adapters.engine.scheduler import composed
from schedloom.core.composition import PolicyChoice, compose
from schedloom.core.registry import Registry
from tests.adapters.engine.harness import FakeRunner, make_scheduler, stock_class, vllm_config, write_model

Make = Callable[..., FakeRunner]


def choose(name: str, **settings: Any) -> PolicyChoice:
    return PolicyChoice.model_validate({"name": name, **settings})


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make(model: Path, asynchronous: bool) -> Make:
    """A composed scheduler of the given policies, with a fake runner that steps it."""

    def build(
        *choices: str | PolicyChoice, registry: Registry | None = None, num_blocks: int = 200, **config: Any
    ) -> FakeRunner:
        named = [PolicyChoice(name=choice) if isinstance(choice, str) else choice for choice in choices]
        policies = compose(named, registry)
        scheduler = composed(stock_class(asynchronous), policies)
        settings = vllm_config(model, asynchronous=asynchronous, **config)
        return FakeRunner(make_scheduler(scheduler, settings, num_blocks), asynchronous)

    return build
