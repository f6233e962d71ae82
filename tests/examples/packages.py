"""Third-party packages, installed beside the developer's environment and not into it."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Installed:
    """A package built from ``source`` and installed into a folder that only its own processes see."""

    source: Path
    target: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``python -m ARGUMENTS`` in the package's folder, as one would who has it installed."""
        path = os.pathsep.join(filter(None, [str(self.target), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(command, cwd=self.source, env=environment, capture_output=True, text=True, check=False)

    def run_its_tests(self) -> None:
        ended = self.run("pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "tests")
        assert ended.returncode == 0, ended.stdout + ended.stderr


def install(package: Path, folder: Path) -> Installed:
    """Build a copy of ``package`` with what is here already: no index, no isolation, no dependency is asked for.

    The copy lies below a project whose settings of pytest are none of its business, as it does in a checkout.
    """
    source, target = folder / "source", folder / "site"
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--of-another-project"\n')
    shutil.copytree(package, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(target), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return Installed(source, target)
