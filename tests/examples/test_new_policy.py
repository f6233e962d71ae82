"""C2: ``schedloom new-policy`` writes a package that works as it stands, and never overwrites anything."""

import ast
import re
from pathlib import Path

import pytest

from schedloom.commands.new_policy import names_for, write_package
from schedloom.core.errors import ConfigurationError
from tests.commands.conftest import Command, schedloom
from tests.examples.packages import Installed, install

__all__ = ["schedloom"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("written")
    write_package(folder / "package", names_for("long-prompts-away"))
    return install(folder / "package", folder)


def test_the_tests_that_it_writes_pass(written: Installed) -> None:
    written.run_its_tests()


def test_what_it_writes_is_installed_under_the_given_name(written: Installed) -> None:
    shown = written.run("schedloom", "policies", "long_prompts_away").stdout
    assert "long_prompts_away - schedloom-long-prompts-away 0.1.0" in shown
    assert "max_prompt_tokens  integer >= 1  32768" in shown and "Fails how" in shown
    assert "Needs: a Decoder" in shown and re.search(r"^needs +decoder$", shown, re.MULTILINE)
    assert (written.target / "schedloom_long_prompts_away" / "py.typed").is_file()


def test_what_it_writes_keeps_to_the_style_of_the_house(written: Installed) -> None:
    for command in (("check", "--select", "E,F,W,I,UP,B,RUF", "--line-length", "120"), ("format", "--diff")):
        ended = written.run("ruff", *command, "--isolated", "--config", "line-length=120", "src", "tests")
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_command_says_what_to_do_next(schedloom: Command) -> None:
    ended = schedloom("new-policy", "tenant_quota")
    assert ended.status == 0 and "cd schedloom-tenant-quota && pip install" in ended.out
    readme = Path("schedloom-tenant-quota/README.md").read_text()
    (install,) = re.findall(r"pip install .*?'\.\[test\]'", ended.out)
    assert install.startswith("pip install /path/to/schedloom ") and install in readme
    assert Path("schedloom-tenant-quota/src/schedloom_tenant_quota/policy.py").is_file()
    assert schedloom("new-policy", "tenant-quota", "--directory", "elsewhere").status == 0
    assert Path("elsewhere/pyproject.toml").is_file()


def test_nothing_is_overwritten_and_nothing_half_written(schedloom: Command) -> None:
    kept = Path("p/tests/test_mine.py")
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    ended = schedloom("new-policy", "mine", "--directory", "p")
    assert ended.status == 1 and f"{kept} is already there" in ended.err
    assert [path for path in Path("p").rglob("*") if path.is_file()] == [kept] and kept.read_text() == "mine"


@pytest.mark.parametrize("name", ["Tenant", "9lives", "a b", "a--b", "-a", "", "../up"])
def test_a_name_that_cannot_be_a_module_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot name a policy; write lower-case words"):
        names_for(name)


@pytest.mark.parametrize("name", ["class", "lambda"])
def test_a_word_of_pythons_own_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name!r} is a word of Python's own; .*, such as {name}_policy"):
        names_for(name)


@pytest.mark.parametrize("name", ["admission", "verdict", "requirements", "true", "none"])
def test_a_name_whose_class_would_hide_another_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name!r} makes a class {name.capitalize()}, which is there already"):
        names_for(name)


def test_the_name_of_an_installed_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schedloom_taken.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match="'taken' makes a module schedloom_taken, which is installed already"):
        names_for("taken")


@pytest.mark.parametrize("name", ["match", "settings", "a1", "x-2"])
def test_any_other_name_does(name: str, tmp_path: Path) -> None:
    names = names_for(name)
    write_package(tmp_path, names)
    source = (tmp_path / "src" / names["module"] / "policy.py").read_text()
    assert names["class_name"] in ast.unparse(ast.parse(source))


def test_the_name_of_an_installed_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'append_prefill' is the name of a policy of schedloom"):
        names_for("append-prefill")


def test_a_folder_that_cannot_be_written_is_told(schedloom: Command) -> None:
    Path("file").write_text("")
    ended = schedloom("new-policy", "mine", "--directory", "file/below")
    assert ended.status == 1 and len(ended.err.splitlines()) == 1 and "cannot be written" in ended.err
