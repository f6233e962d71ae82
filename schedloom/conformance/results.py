"""What a run of the suite found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol

from schedloom.conformance.coverage import Coverage
from schedloom.conformance.script import Act
from schedloom.conformance.verdicts import Verdict, Violation

NEVER_REJECTED = (
    "a policy that turns nobody away says conformance_never_rejects = True; one that does wants conformance_settings "
    "under which sequences of at most 192 tokens reach its thresholds (docs/conformance.md)"
)


class Case(Protocol):
    """What one result is about; in T2 a cell of the matrix."""

    def label(self) -> str:
        """It in a line of words; equal cases have equal labels."""
        ...

    def to_plain(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class CellResult:
    """One cell. ``invariants`` holds a verdict for each that applies; ``missing`` are the events that never happened;
    ``script`` is the shortest script known to break it; ``aimed`` of the ``seeds`` brought weather for the missing."""

    cell: Any
    verdict: Verdict
    tier: str = "T2"
    invariants: dict[str, Verdict] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    script: list[Act] = field(default_factory=list)
    failing_seed: int | None = None
    seeds: int = 0
    aimed: int = 0
    steps: int = 0
    events: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def id(self) -> str:
        return cell_id(self.cell)

    @property
    def advice(self) -> list[str]:
        """What whoever wrote the policy can do about what is missing."""
        return [NEVER_REJECTED] if "rejected" in self.missing else []

    @property
    def reasons(self) -> list[str]:
        """Why it did not pass, and what can be done about it."""
        found = [f"{violation.invariant}: {violation.message}" for violation in self.violations]
        missing = [f"never happened: {', '.join(self.missing)}"] if self.missing else []
        return [*found, *missing, *self.advice]


@dataclass(slots=True)
class MutantResult:
    """``killed`` when it was accused of breaking what it breaks; ``seed`` is where."""

    name: str
    dies_on: str
    killed: bool
    seed: int | None
    message: str = ""


@dataclass(slots=True)
class RunResult:
    """A whole run. ``first_seed`` and the numbers of seeds in each cell say all that is needed to do it again.
    ``unavailable`` are the tiers that cannot be run here, with the reason."""

    subject: str | None
    profile: str
    tiers: list[str]
    first_seed: int
    environment: dict[str, Any]
    cells: list[CellResult] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    composition: list[Violation] = field(default_factory=list)
    composed: int = 0
    coverage: dict[str, Coverage] = field(default_factory=dict)
    mutants: list[MutantResult] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    soak_steps: int = 0
    soak_seeds: tuple[int, int] | None = None
    out_of_budget: bool = False
    seconds: float = 0.0

    @property
    def counts(self) -> Counter[Verdict]:
        counts = Counter(result.verdict for result in self.cells)
        counts[Verdict.REFUSED] += sum(self.refusals.values())
        return counts

    @property
    def steps(self) -> int:
        return self.soak_steps + sum(result.steps for result in self.cells)

    @property
    def verdict(self) -> Verdict:
        """Passed only when nothing failed, nothing is inconclusive, and what was to be covered was."""
        if self.composition or self.counts[Verdict.FAILED] or not all(mutant.killed for mutant in self.mutants):
            return Verdict.FAILED
        covered = all(coverage.complete for coverage in self.coverage.values())
        incomplete = self.counts[Verdict.INCONCLUSIVE] or not covered or self.out_of_budget or self.unavailable
        if incomplete or not (self.cells or self.composed):
            return Verdict.INCONCLUSIVE
        return Verdict.PASSED


def cell_id(cell: Case) -> str:
    """A short name that stays the same from run to run."""
    return sha256(cell.label().encode()).hexdigest()[:8]
