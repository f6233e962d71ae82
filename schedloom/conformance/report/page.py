"""The report as a page for people. Colours never stand alone: every one of them has its word."""

from __future__ import annotations

from html import escape

from schedloom.conformance.invariants import INVARIANTS
from schedloom.conformance.report.document import by_verdict, reproduce, summary
from schedloom.conformance.results import CellResult, RunResult
from schedloom.conformance.verdicts import Verdict

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; margin: 1rem 0; width: 100% }
th, td { border: 1px solid #d0d7de; padding: .3rem .5rem; text-align: left; vertical-align: top }
th { background: #f6f8fa } code { font-size: .85em } details { margin: .2rem 0 }
.passed { background: #dafbe1 } .failed { background: #ffd7d5 }
.inconclusive { background: #fff3c4 } .refused { background: #eaeef2 }
@media (prefers-color-scheme: dark) {
  body { background: #0d1117; color: #e6edf3 } th { background: #161b22 } th, td { border-color: #30363d }
  .passed { background: #12361f } .failed { background: #4a1616 }
  .inconclusive { background: #453409 } .refused { background: #21262d }
}
"""


def render(result: RunResult) -> str:
    parts = [_head(result), _refusals(result), _invariants(result), _cells(result), _mutants(result)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>schedloom conformance</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        + "".join(parts)
        + "</body></html>"
    )


def _head(result: RunResult) -> str:
    facts = summary(result)
    cells = ", ".join(f"{count} {verdict}" for verdict, count in facts["cells"].items())
    coverage = "; ".join(
        f"{tier}: {found.covered} of {found.legal} combinations of {found.strength} axes"
        for tier, found in result.coverage.items()
    )
    rows = {
        "Verdict": _mark(result.verdict),
        "Subject": escape(result.subject or "every registered policy"),
        "Cells": escape(cells),
        "Covered": escape(coverage or "nothing was to be covered"),
        "Not run": escape("; ".join(f"{tier}: {reason}" for tier, reason in result.unavailable.items()) or "nothing"),
        "Steps": f"{result.steps:,}",
        "Known-bad subjects found": f"{facts['mutants']['killed']} of {facts['mutants']['total']}",
        "Seeds": f"from {result.first_seed}",
        "On": escape(", ".join(f"{name} {value}" for name, value in result.environment.items())),
    }
    lines = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows.items())
    return f"<h1>Conformance</h1><table>{lines}</table>"


def _mark(verdict: Verdict) -> str:
    return f'<span class="{verdict.value}">{verdict.value}</span>'


def _refusals(result: RunResult) -> str:
    lines = [f"<tr><td>{count}</td><td>{escape(reason)}</td></tr>" for reason, count in result.refusals.most_common()]
    table = f"<table><tr><th>Cells</th><th>Reason</th></tr>{''.join(lines)}</table>" if lines else "<p>None.</p>"
    return f"<h2>Refused at composition</h2>{table}"


def _invariants(result: RunResult) -> str:
    lines = []
    for invariant in INVARIANTS.values():
        counts = ", ".join(f"{count} {word}" for word, count in by_verdict(result, invariant.id).items())
        cells = f"<th>{invariant.id}</th><td>{escape(invariant.statement)}</td><td>{counts or 'not looked at'}</td>"
        lines.append(f"<tr>{cells}</tr>")
    return f"<h2>Invariants</h2><table>{''.join(lines)}</table>"


def _cells(result: RunResult) -> str:
    lines = "".join(_cell(cell, result.first_seed) for cell in result.cells)
    head = "<tr><th>Cell</th><th>Verdict</th><th>Seeds</th><th>Steps</th><th>Again</th></tr>"
    return f"<h2>Cells</h2><table>{head}{lines}</table>"


def _cell(cell: CellResult, first_seed: int) -> str:
    more = f"<details><summary>why</summary>{'<br>'.join(map(escape, cell.reasons))}</details>" if cell.reasons else ""
    seeds = f"{cell.seeds}, {cell.aimed} aimed" if cell.aimed else str(cell.seeds)
    return (
        f'<tr><td>{escape(cell.cell.label())}</td><td class="{cell.verdict.value}">{cell.verdict.value}{more}</td>'
        f"<td>{seeds}</td><td>{cell.steps}</td><td><code>{escape(reproduce(cell, first_seed))}</code></td></tr>"
    )


def _mutants(result: RunResult) -> str:
    lines = "".join(
        f"<tr><td>{mutant.name}</td><td>{mutant.dies_on}</td>"
        f'<td class="{"passed" if mutant.killed else "failed"}">{"found" if mutant.killed else "not found"}</td>'
        f"<td>{escape(mutant.message)}</td></tr>"
        for mutant in result.mutants
    )
    head = "<tr><th>Subject</th><th>Breaks</th><th>Was</th><th>Accused of</th></tr>"
    return f"<h2>Known-bad subjects</h2><table>{head}{lines}</table>"
