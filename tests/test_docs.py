"""C2, C3: the documentation cannot drift from the code."""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sized
from importlib import import_module
from importlib.metadata import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from schedloom import Policy
from schedloom.cli import app
from schedloom.commands.documents import read_document
from schedloom.core.composition import PolicyChoice, compose, review
from schedloom.core.config import SchedulerSection
from schedloom.core.hooks import hooks_of, side_of, specified_hooks
from schedloom.core.registry import Registry
from scripts.reference import made, walk
from tests.commands.conftest import Command, schedloom
from tests.core.fakes import FakeRegistry

__all__ = ["schedloom"]

DOCS = Path(__file__).parents[1] / "docs"
GUIDE = (DOCS / "writing-a-policy.md").read_text(encoding="utf-8")
CONFIGURATION = (DOCS / "configuration.md").read_text(encoding="utf-8")
BUILT_IN = [name for name in Registry().names() if Registry().is_built_in(name)]


def fenced(text: str, *languages: str) -> list[str]:
    """The fenced examples in these languages."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [code for language, code in blocks if language in languages]


def test_the_guide_describes_every_hook_with_its_exact_parameters() -> None:
    described = dict(re.findall(r"^### `(\w+)\((.*)\)`$", GUIDE, re.MULTILINE))
    assert described == {name: ", ".join(parameters) for name, parameters in specified_hooks().items()}


def test_the_guide_describes_every_hook_on_its_side() -> None:
    for side in ("engine", "router"):
        (part,) = re.findall(rf"^## Hooks of the {side}$(.*?)^## ", GUIDE, re.MULTILINE | re.DOTALL)
        assert {side_of(hook) for hook in re.findall(r"^### `(\w+)\(", part, re.MULTILINE)} == {side}


def test_nobody_is_told_to_install_by_name_what_is_in_no_index() -> None:
    root = DOCS.parent
    inside = (path for part in ("docs", "examples", "schedloom") for path in (root / part).rglob("*.*"))
    texts = [path.read_text("utf-8") for path in inside if path.suffix in (".md", ".py", ".template")]
    told = [line for text in texts for line in re.findall(r"pip install .*", text)]
    assert len(told) > 10
    assert not [line for line in told if re.match(r"""pip install ([^&\s]+ )*['"]?schedloom\b""", line)]


def test_every_extra_is_explained() -> None:
    named = set(re.findall(r"^- `([\w-]+)`: ", CONFIGURATION.split("## An engine")[0], re.MULTILINE))
    assert named == set(metadata("schedloom").get_all("Provides-Extra") or ()) - {"dev"}


def test_every_fence_is_of_a_kind_that_is_run() -> None:
    for text in (GUIDE, CONFIGURATION):
        assert set(re.findall(r"^```(\w+)$", text, re.MULTILINE)) <= {"python", "sh", "toml", "yaml"}
        assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(fenced(text, "python", "sh", "toml", "yaml"))


@pytest.fixture(scope="module")
def guide() -> Iterator[ModuleType]:
    """All Python of the guide, run from top to bottom as one module."""
    module = ModuleType("guide_to_policies")
    sys.modules[module.__name__] = module
    for number, code in enumerate(fenced(GUIDE, "python"), start=1):
        exec(compile(code, f"writing-a-policy.md, Python example {number}", "exec"), module.__dict__)
    yield module
    del sys.modules[module.__name__]


def policies_of(module: ModuleType) -> dict[str, type[Policy]]:
    classes = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Policy))
    return {policy.name: policy for policy in classes if policy is not Policy}


def test_every_policy_of_the_guide_can_be_composed(guide: ModuleType) -> None:
    policies = policies_of(guide)
    for name in policies:
        assert compose([PolicyChoice(name=name)], FakeRegistry(policies)).names == [name]


def test_the_guide_shows_every_hook_at_work(guide: ModuleType) -> None:
    shown = {hook for policy in policies_of(guide).values() for hook in hooks_of(policy)}
    assert shown == set(specified_hooks())


def test_the_guides_entry_point_names_its_policy(guide: ModuleType) -> None:
    (example,) = fenced(GUIDE, "toml")
    group, name, module, attribute = re.findall(r'\[(.*)\]\n(\w+) = "(\w+):(\w+)"\n', example)[0]
    assert group == 'project.entry-points."schedloom.policies"'
    assert (module, getattr(guide, attribute).name) == (f"schedloom_{name}", name)


@pytest.mark.parametrize("text", [GUIDE, CONFIGURATION], ids=["writing-a-policy", "configuration"])
def test_the_commands_of_the_pages_run(schedloom: Command, text: str) -> None:
    for name, example in zip(("engine", "router"), fenced(CONFIGURATION, "yaml"), strict=True):
        Path(f"{name}.yaml").write_text(example)
    for line in "".join(fenced(text, "sh")).splitlines():
        ended = schedloom(*shlex.split(line)[1:])
        assert ended.status == 0, f"{line}: {ended.err}"


def test_a_router_that_a_page_starts_waits_for_engines() -> None:
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    started = re.findall(r"^ .*schedloom route --prefill .*(?:(?<=\\)\n.*)*", text, re.MULTILINE)
    assert len(started) >= 3
    assert [command for command in started if "--wait " not in command] == []


@pytest.mark.parametrize(("side", "place"), [("engine", 0), ("router", 1)])
def test_the_configurations_of_the_page_fit(tmp_path: Path, side: str, place: int) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(fenced(CONFIGURATION, "yaml")[place])
    document = read_document(file)
    assert document.side == side and document.section.choices
    assert review(document.section.choices, side=document.side).complaints == ()


def test_the_page_names_every_key_of_the_engines_section() -> None:
    assert rows_of(CONFIGURATION).keys() == SchedulerSection.model_fields.keys()


def rows_of(text: str) -> dict[str, str]:
    """The first column of the tables, where it is code, with the second."""
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))


def as_written(default: Any) -> str:
    """A default as a reader would write it: JSON, or ``none`` for what is empty."""
    if default is None or (isinstance(default, Sized) and not default):
        return "none"
    return json.dumps(sorted(default) if isinstance(default, frozenset) else default)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_policys_readme_names_its_settings_and_hooks(name: str) -> None:
    policy = Registry().load(name)
    file = import_module(policy.__module__).__file__
    assert file is not None
    readme = (Path(file).parent / "README.md").read_text(encoding="utf-8")
    assert readme.startswith(f"# {name}\n")
    assert rows_of(readme).keys() == policy.Settings.model_fields.keys()
    for key, shown in rows_of(readme).items():
        default = policy.Settings.model_fields[key].default
        assert shown.strip("`") in {as_written(default), as_written(default).removesuffix(".0")}, key
    (kind,) = re.findall(r"^\*\*Type\*\*: .*?hooks? (.*?)\)", readme, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", kind)) == set(hooks_of(policy))
    for part in ("**Claims**:", "**Fails how**:"):
        assert part in readme


def test_what_is_made_from_the_code_is_current() -> None:
    for path, text in made().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: run python scripts/reference.py"


def test_the_reference_has_every_command() -> None:
    reference = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    commands = dict(walk(typer.main.get_command(app)))
    assert re.findall(r"^## (.*)$", reference, re.MULTILINE) == list(commands)
    assert {"schedloom route", "schedloom config validate", "schedloom policies"} <= commands.keys()


def test_links_between_pages_lead_somewhere() -> None:
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
