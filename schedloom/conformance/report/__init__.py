"""What a run says, for tools (YAML, JSON), for people (HTML) and for CI (JUnit)."""

from __future__ import annotations

from pathlib import Path

from schedloom.conformance.report import document, junit, page
from schedloom.conformance.results import RunResult

__all__ = ["write"]


def write(result: RunResult, path: Path) -> None:
    """Write the form that ``path``'s suffix names: .html, .xml (JUnit), anything else YAML."""
    text = {".html": page.render, ".xml": junit.render}.get(path.suffix, document.render)(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
