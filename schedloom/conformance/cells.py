"""A cell of the matrix: one combination of policies on one kind of engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

Role = Literal["none", "consumer", "producer", "both"]
Variant = Literal["plain", "ngram", "eagle", "sliding", "hybrid"]
VARIANTS: tuple[Variant, ...] = ("plain", "ngram", "eagle", "sliding", "hybrid")
WINDOW = 21
"""Tokens that a layer with a sliding window attends to, its own included."""

_FLAGS = (
    "pushes",
    "offload",
    "multi_connector",
    "prefix_caching",
    "priority",
    "roomy",
    "zeroing",
    "recompute_failed_loads",
)
AXES = ("policies", "variant", "asynchronous", "runner", "role", *_FLAGS)


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group. ``window`` is in tokens; None is full attention."""

    block_size: int
    window: int | None = None

    def blocks_for(self, num_tokens: int, in_flight: int) -> int:
        """The most blocks that a sequence of ``num_tokens`` holds with ``in_flight`` of them being computed."""
        held = num_tokens if self.window is None else min(num_tokens, self.window + in_flight) + self.block_size
        return -(-held // self.block_size)


@dataclass(frozen=True, slots=True)
class Cell:
    """The axes first, then the sizes that are the same everywhere.

    ``variant``: the model is plain; or its tokens are drafted, from n-grams or by a drafter that writes KV ahead
    (``eagle``); or all of its layers look through a sliding window, or some, in blocks of another size (``hybrid``).
    ``zeroing``: new blocks are zeroed before use, as a cache with Mamba layers asks for. ``recompute_failed_loads``:
    what vLLM does when a transfer fails; otherwise the request ends in an error. ``pushes``: KV is written by the
    Prefiller instead of read by the Decoder. ``offload``: there is a connector that saves preempted requests; with a
    role beside it, or with ``multi_connector``, connectors stand in vLLM's own MultiConnector. Sizes are in tokens,
    blocks and sequences.

    ``whole_loads`` and ``failed_blocks`` are no axes: with a sliding window, transfers bring the KV of the last prompt
    token too, and tell of the blocks that failed instead of the request. vLLM is not exact then, and what is known of
    that is pinned by tests.
    """

    policies: tuple[str, ...] = ()
    variant: Variant = "plain"
    asynchronous: bool = False
    runner: Literal["v1", "v2"] = "v1"
    role: Role = "none"
    pushes: bool = False
    offload: bool = False
    multi_connector: bool = False
    prefix_caching: bool = True
    priority: bool = False
    roomy: bool = False
    zeroing: bool = False
    recompute_failed_loads: bool = True
    whole_loads: bool = False
    failed_blocks: bool = False
    block_size: int = 4
    max_model_len: int = 192
    max_num_seqs: int = 8
    token_budget: int = 48
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        """Roomy holds every running sequence to its end; otherwise about two fit, the null block included."""
        longest = sum(group.blocks_for(self.max_model_len, 2 * self.token_budget) for group in self.groups)
        return (longest * self.max_num_seqs if self.roomy else 2 * longest) + 1

    @property
    def groups(self) -> tuple[Group, ...]:
        full, sliding = Group(self.block_size), Group(self.block_size, WINDOW)
        if self.variant == "sliding":
            return (sliding,)
        return (full, Group(2 * self.block_size, WINDOW)) if self.variant == "hybrid" else (full,)

    @property
    def slides(self) -> bool:
        return any(group.window for group in self.groups)

    @property
    def drafts(self) -> bool:
        return self.variant in ("ngram", "eagle")

    @property
    def receives(self) -> bool:
        return self.role in ("consumer", "both")

    @property
    def connects(self) -> bool:
        return self.role != "none" or self.offload

    @property
    def sends(self) -> bool:
        return self.role in ("producer", "both")

    def axes(self) -> dict[str, Any]:
        return {axis: getattr(self, axis) for axis in AXES}

    def engine_axes(self) -> dict[str, Any]:
        return {axis: value for axis, value in self.axes().items() if axis != "policies"}

    def label(self) -> str:
        """The cell in a line of words; equal cells have equal labels."""
        words = ["+".join(self.policies) or "no policy", "async" if self.asynchronous else "sync", self.runner]
        words.append(self.role if self.role == "none" else f"KV {self.role}")
        words.extend(_VARIANTS[self.variant])
        words.extend(name.replace("_", " ") for name in _FLAGS if getattr(self, name))
        return ", ".join(words)

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "policies": list(self.policies)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Cell:
        known = {field.name for field in fields(cls)}
        if unknown := plain.keys() - known:
            raise ValueError(f"a cell has no {', '.join(sorted(unknown))}")
        return cls(**{**plain, "policies": tuple(plain.get("policies", ()))})


_VARIANTS: dict[Variant, list[str]] = {
    "plain": [],
    "ngram": ["n-gram drafts"],
    "eagle": ["drafts ahead"],
    "sliding": ["sliding window"],
    "hybrid": ["hybrid KV"],
}


def illegal(cell: Cell) -> str | None:
    """Why no such engine exists, or None. Policies are not looked at: they are refused by composition itself."""
    if cell.multi_connector and not cell.connects:
        return "without a KV role there is no connector"
    if cell.pushes and cell.role == "none":
        return "without a KV role nobody pushes"
    if cell.offload and cell.role != "none" and not cell.multi_connector:
        return "two connectors need vLLM's MultiConnector"
    if not cell.receives and not cell.recompute_failed_loads:
        return "without incoming transfers there is nothing to recompute"
    return None


def legal_cells(combinations: list[tuple[str, ...]], prototype: Cell | None = None) -> Iterator[Cell]:
    """Every legal cell over ``combinations`` of policies, sizes as in ``prototype``."""
    from itertools import product

    sizes = {field.name: getattr(prototype or Cell(), field.name) for field in fields(Cell)}
    values: dict[str, list[Any]] = {axis: [False, True] for axis in AXES}
    values |= {"policies": [()], "runner": ["v1", "v2"]}
    values["role"] = ["none", "consumer", "producer", "both"]
    values["variant"] = list(VARIANTS)
    choices = (dict(zip(values, choice, strict=True)) for choice in product(*values.values()))
    engines = [engine for engine in (Cell(**{**sizes, **choice}) for choice in choices) if illegal(engine) is None]
    return (replace(engine, policies=policies) for policies in combinations for engine in engines)
