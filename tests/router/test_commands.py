"""X8: what cannot be used is refused in one sentence."""

import pytest
from typer.testing import CliRunner

from schedloom.cli import app


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give --prefill URL and --decode URL, each at least once, or --config FILE"),
        (["--prefill", "http://h:1"], "give --prefill URL and --decode URL, each at least once, or --config FILE"),
        (["--prefill", "http://127.0.0.1:99999", "--decode", "http://127.0.0.1:1"], "has no usable port"),
        (["--prefill", "127.0.0.1", "--decode", "http://127.0.0.1:1"], "write it as http://host:port"),
        (["--prefill", "a=http://h:1", "--decode", "a=http://h:2"], "workers: a is the name of two engines"),
        (["--prefill", "prefiller-0=http://h:1", "--decode", "http://h:2"], "engines without a name are given"),
        (["--prefill", "http://h:1?a=b", "--decode", "http://h:2"], "carries more than an address"),
        (["--prefill", "http://h:1/v1", "--decode", "http://h:2"], "leave out /v1: http://h:1"),
        (["--log-level", "loud"], "'loud' is not one of"),
    ],
)
def test_refusals(arguments: list[str], sentence: str) -> None:
    ran = CliRunner().invoke(app, ["route", *arguments])
    assert ran.exit_code != 0
    assert sentence in " ".join(ran.output.replace("│", " ").split())
    assert ran.exception is None or isinstance(ran.exception, SystemExit)
