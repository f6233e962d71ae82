from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from schedloom.cli import main


class Ended(NamedTuple):
    """What a command left."""

    status: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def schedloom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs ``schedloom`` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: object) -> Ended:
        monkeypatch.setattr("sys.argv", ["schedloom", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Ended(int(ended.value.code or 0), said.out, said.err)

    return command
