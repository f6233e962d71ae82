"""The model's pool of KV blocks with its prefix cache, and what policies see of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

from schedloom.conformance.pure.requests import ModelRequest, TokenIds
from schedloom.core.views import Blocks, RequestView


@dataclass(slots=True)
class Block:
    key: Hashable = None
    owners: int = 0


class Pool:
    """Free blocks still hold the prefix cache, and are reused in the order in which they came in."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free: dict[int, None] = dict.fromkeys(range(num_blocks))
        self.cached: dict[Hashable, int] = {}
        self.num_taken = 0

    def prefix(self, tokens: TokenIds) -> list[int]:
        """The cached blocks of ``tokens``, without the block that its last token is in."""
        found: list[int] = []
        for key in self._keys(tokens[: len(tokens) - 1]):
            if key not in self.cached:
                break
            found.append(self.cached[key])
        return found

    def share(self, blocks: list[int]) -> None:
        for number in blocks:
            self.num_taken += self.blocks[number].owners == 0
            self.free.pop(number, None)
            self.blocks[number].owners += 1

    def take(self, count: int) -> list[int]:
        """``count`` blocks, or none when there are fewer."""
        if count > len(self.free):
            return []
        taken = list(islice(self.free, count))
        for number in taken:
            self.cached.pop(self.blocks[number].key, None)
            self.blocks[number].key = None
        self.share(taken)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for number in reversed(blocks):
            self.blocks[number].owners -= 1
            if not self.blocks[number].owners:
                self.free[number] = None

    def remember(self, request: ModelRequest) -> None:
        """Let the full blocks of ``request`` be found."""
        keys = self._keys(request.tokens[: request.num_computed_tokens])
        for number, key in zip(request.blocks, keys, strict=False):
            if self.blocks[number].key is None and key not in self.cached:
                self.blocks[number].key = key
                self.cached[key] = number

    def _keys(self, tokens: TokenIds) -> list[int]:
        keys, before = [], 0
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            before = hash((before, tokens[end - self.block_size : end]))
            keys.append(before)
        return keys


@dataclass(slots=True)
class KnownBlocks:
    """Blocks with what they held when somebody looked."""

    entries: list[tuple[int, Hashable]]

    def __len__(self) -> int:
        return len(self.entries)


class PoolFace:
    """A PoolView. One for a policy that only looks on refreshes nothing."""

    __slots__ = ("_acts", "_by_id", "_pool")

    def __init__(self, pool: Pool, by_id: dict[str, ModelRequest], acts: bool) -> None:
        self._pool, self._by_id, self._acts = pool, by_id, acts

    @property
    def num_blocks(self) -> int:
        return len(self._pool.blocks)

    @property
    def num_free(self) -> int:
        return len(self._pool.free)

    @property
    def num_taken(self) -> int:
        return self._pool.num_taken

    def blocks_of(self, request: RequestView) -> KnownBlocks:
        numbers = self._by_id[request.request_id].blocks
        held = ((number, self._pool.blocks[number].key) for number in numbers)
        return KnownBlocks([(number, key) for number, key in held if key is not None])

    def refresh(self, blocks: Blocks) -> int:
        assert isinstance(blocks, KnownBlocks)
        pool = self._pool
        blocks.entries = [(number, key) for number, key in blocks.entries if pool.blocks[number].key == key]
        for number, _ in reversed(blocks.entries) if self._acts else ():
            if number in pool.free:
                del pool.free[number]
                pool.free[number] = None
        return len(blocks)
