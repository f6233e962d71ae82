"""An engine and its requests, as policies see them, with no engine behind."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from schedloom.core.views import BatchReport, Blocks, PeerLoad, RequestView, ReusableKV


@dataclass
class FakeRequest:
    request_id: str = "r"
    num_prompt_tokens: int = 4000
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    is_local_attempt: bool = False
    job_class: str | None = None
    session: str | None = None


class FakeBlocks(list[int]):
    """Numbers of blocks."""


@dataclass
class FakePool:
    """A pool that loses what ``lost`` names, and notes what is refreshed."""

    num_blocks: int = 1000
    num_free: int = 1000
    num_taken: int = 0
    size: int = 10
    refreshed: list[list[int]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    made: int = 0

    def blocks_of(self, request: RequestView) -> Blocks:
        self.made += self.size
        return FakeBlocks(range(self.made - self.size, self.made))

    def refresh(self, blocks: Blocks) -> int:
        assert isinstance(blocks, FakeBlocks)
        blocks[:] = [block for block in blocks if block not in self.lost]
        self.refreshed.append(list(blocks))
        return len(blocks)


@dataclass
class FakeEngine:
    reusable: ReusableKV = field(default_factory=lambda: ReusableKV(0, 0))
    now: float = 0.0
    block_size: int = 16
    num_decoding: int = 0
    num_prefilling: int = 0
    prefill_throttled: bool = False
    last_batch: BatchReport = field(default_factory=BatchReport)
    pool: FakePool = field(default_factory=FakePool)
    peers: Sequence[PeerLoad] = ()
    active: int = 0
    looked_up: list[str] = field(default_factory=list)

    def num_active(self, job_classes: Collection[str]) -> int:
        return self.active

    def reusable_kv(self, request: RequestView, enough: int | None = None) -> ReusableKV:
        self.looked_up.append(request.request_id)
        return self.reusable
