"""The report as YAML, and the few numbers of it as JSON."""

from __future__ import annotations

from typing import Any

import yaml

from schedloom.conformance.invariants import INVARIANTS
from schedloom.conformance.results import CellResult, RunResult
from schedloom.conformance.script import to_plain
from schedloom.conformance.verdicts import Verdict

API_VERSION = "schedloom.dev/conformance/v1"


def render(result: RunResult) -> str:
    return yaml.safe_dump(as_plain(result), sort_keys=False, allow_unicode=True, width=120)


def summary(result: RunResult) -> dict[str, Any]:
    """The numbers by which a run is judged."""
    return {
        "verdict": result.verdict.value,
        "composed": result.composed,
        "cells": {verdict.value: result.counts[verdict] for verdict in Verdict},
        "coverage": {
            tier: {"strength": found.strength, "covered": found.covered, "legal": found.legal}
            for tier, found in result.coverage.items()
        },
        "steps": result.steps,
        "mutants": {"killed": sum(mutant.killed for mutant in result.mutants), "total": len(result.mutants)},
    }


def as_plain(result: RunResult) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "subject": result.subject or "every registered policy",
        "profile": result.profile,
        "tiers": result.tiers,
        "environment": result.environment,
        "firstSeed": result.first_seed,
        "soak": {"steps": result.soak_steps, "seeds": list(result.soak_seeds or ())},
        "seconds": round(result.seconds, 1),
        "outOfBudget": result.out_of_budget,
        "unavailable": result.unavailable,
        **summary(result),
        "refusals": dict(result.refusals.most_common()),
        "compositionViolations": [violation.message for violation in result.composition],
        "invariants": {name: by_verdict(result, name) for name in INVARIANTS},
        "results": [_cell(found, result) for found in result.cells],
        "knownBad": [
            {"name": mutant.name, "diesOn": mutant.dies_on, "killed": mutant.killed, "seed": mutant.seed}
            for mutant in result.mutants
        ],
    }


def by_verdict(result: RunResult, invariant: str) -> dict[str, int]:
    """In how many cells ``invariant`` got which verdict."""
    found = [cell.invariants[invariant] for cell in result.cells if invariant in cell.invariants]
    return {verdict.value: found.count(verdict) for verdict in Verdict if verdict in found}


def reproduce(cell: CellResult, first_seed: int) -> str:
    """The command that tries this cell again."""
    seed = first_seed if cell.failing_seed is None else cell.failing_seed
    return f"schedloom conformance run --tier {cell.tier} --cell {cell.id} --seed {seed}"


def _cell(cell: CellResult, result: RunResult) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "id": cell.id,
        "tier": cell.tier,
        "label": cell.cell.label(),
        "verdict": cell.verdict.value,
        "seeds": cell.seeds,
        "aimed": cell.aimed,
        "steps": cell.steps,
        "seconds": round(cell.seconds, 2),
        "invariants": {name: verdict.value for name, verdict in cell.invariants.items()},
        "events": dict(sorted(cell.events.items())),
        "reproduce": reproduce(cell, result.first_seed),
    }
    if cell.missing:
        plain["missing"] = cell.missing
    if cell.advice:
        plain["advice"] = cell.advice
    if cell.violations:
        plain["violations"] = [f"{found.invariant}: {found.message} (step {found.step})" for found in cell.violations]
    if cell.script or (cell.violations and cell.tier not in ("T1", "T2")):
        plain["replay"] = replay_document(cell)
    return plain


def replay_document(cell: CellResult) -> dict[str, Any]:
    """What ``--replay`` takes: the cell and the acts; of a tier without scripts the cell's id and the seed."""
    if not cell.script:
        return {"tier": cell.tier, "cell": cell.id, "seed": cell.failing_seed or 0}
    return {
        "cell": {**cell.cell.to_plain(), "seed": cell.failing_seed or 0},
        "acts": [to_plain(act) for act in cell.script],
    }
