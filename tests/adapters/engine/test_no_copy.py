"""X1: not one run of statements of vLLM's schedule() or update_from_output() stands in this package."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

import schedloom

RUN = 3
"""Consecutive equal statements that count as a copy."""


def statements(tree: ast.AST) -> Iterator[list[int]]:
    """Every block of statements, each statement as a number that formatting and comments do not change."""
    digests: dict[ast.AST, int] = {}
    digest(tree, digests)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield [digests[statement] for statement in block if not is_docstring(statement)]


def digest(value: object, digests: dict[ast.AST, int]) -> int:
    """Of a node, by its kind and all that it holds; ``digests`` gets those of all nodes within it."""
    if isinstance(value, list):
        return hash(tuple(digest(each, digests) for each in value))
    if not isinstance(value, ast.AST):
        return hash((type(value), value))
    fields = tuple(digest(field, digests) for _, field in ast.iter_fields(value))
    digests[value] = hash((type(value), fields))
    return digests[value]


def is_docstring(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def runs(tree: ast.AST) -> set[tuple[int, ...]]:
    return {tuple(block[i : i + RUN]) for block in statements(tree) for i in range(len(block) - RUN + 1)}


@cache
def upstream_runs() -> set[tuple[int, ...]]:
    methods = [getattr(cls, name) for cls in (Scheduler, AsyncScheduler) for name in ("schedule", "update_from_output")]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(method))) for method in methods]
    return set().union(*map(runs, trees))


def copied_runs(source: str) -> int:
    return len(runs(ast.parse(source)) & upstream_runs())


def test_nothing_is_copied() -> None:
    files = Path(schedloom.__file__).parent.rglob("*.py")
    assert {str(file): count for file in files if (count := copied_runs(file.read_text()))} == {}


def test_a_copy_would_be_noticed() -> None:
    source = textwrap.dedent(inspect.getsource(Scheduler.schedule))
    assert copied_runs(source.replace("scheduled_timestamp", "scheduled_timestamp")) > 50
