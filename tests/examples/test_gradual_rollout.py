"""C2: a policy that lives in a package of its own is found, explained, configured and run, with no change here."""

import json
from pathlib import Path

import pytest

from schedloom.core.registry import Registry
from tests.examples.packages import Installed, install

EXAMPLE = Path(__file__).parents[2] / "examples" / "gradual-rollout"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(EXAMPLE, tmp_path_factory.mktemp("example"))


def test_its_own_tests_pass_on_the_installed_package(example: Installed) -> None:
    example.run_its_tests()


def test_it_is_listed_and_shown_with_settings_and_readme(example: Installed) -> None:
    listed = example.run("schedloom", "policies").stdout
    assert "schedloom-gradual-rollout 0.1.0" in listed and "append_prefill" in listed
    shown = example.run("schedloom", "policies", "gradual_rollout").stdout
    assert "number >= 0 <= 100" in shown and "Share of local attempts" in shown
    assert "Fails how" in shown, "the README that the package was built with"


def test_it_is_composed_from_configuration(example: Installed) -> None:
    names = [{"name": "gradual_rollout", "percent": 5}, {"name": "append_prefill"}]
    (example.source / "engine.json").write_text(json.dumps({"scheduler_config": {"policies": names}}))
    facts = json.loads(example.run("schedloom", "explain", "--json", "engine.json").stdout)
    assert facts["hooks"]["admit"] == ["append_prefill", "gradual_rollout"]
    assert facts["policies"]["gradual_rollout"]["package"] == "schedloom-gradual-rollout 0.1.0"


def test_its_settings_are_part_of_the_schema(example: Installed) -> None:
    schema = json.loads(example.run("schedloom", "config", "schema", "engine").stdout)
    assert schema["$defs"]["GradualRollout"]["properties"]["percent"]["maximum"] == 100


def test_the_developers_environment_is_left_alone(example: Installed) -> None:
    assert "gradual_rollout" not in Registry().names()
    assert not list(EXAMPLE.rglob("*.egg-info"))
