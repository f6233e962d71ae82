"""What the two sides of the connector tell each other, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(slots=True)
class BlockCopies:
    """Blocks of one KV cache group, and the host slot that belongs to each."""

    group: int
    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Job:
    """One request's save or load. Numbers rise: a worker that is told of a job again has done it already."""

    number: int
    request_id: str
    copies: list[BlockCopies]


@dataclass
class OffloadMetadata(KVConnectorMetadata):
    """From the scheduler to the workers: what to begin in this step."""

    saves: list[Job] = field(default_factory=list)
    loads: list[Job] = field(default_factory=list)


@dataclass
class SaveReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: on how many workers each save is done, and which ones failed on any."""

    done: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def aggregate(self, other: SaveReport) -> SaveReport:
        done = dict(self.done)
        for number, count in other.done.items():
            done[number] = done.get(number, 0) + count
        return SaveReport(done, self.failed | other.failed)
