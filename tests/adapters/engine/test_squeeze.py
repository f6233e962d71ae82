"""C5: want of memory in a cell of T3 comes when two run, is over when one of them is gone, and costs no block."""

from types import SimpleNamespace
from typing import Any

from schedloom.adapters.engine.reality.squeeze import Squeeze


class Pool:
    """A fake of vLLM's block pool: blocks are numbers."""

    def __init__(self) -> None:
        self.free = [1, 2, 3]

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def free_blocks(self, blocks: list[int]) -> None:
        self.free += blocks


def decoding(count: int) -> list[Any]:
    return [SimpleNamespace(num_output_tokens=1) for _ in range(count)]


def test_it_takes_and_gives_back() -> None:
    pool, wanted = Pool(), True
    manager = SimpleNamespace(block_pool=pool)
    scheduler = SimpleNamespace(running=decoding(1), kv_cache_manager=manager)
    squeeze = Squeeze(scheduler, lambda: wanted)
    squeeze.look()
    assert pool.free == [1, 2, 3], "one alone would only preempt itself"
    scheduler.running = [*decoding(2), SimpleNamespace(num_output_tokens=0)]
    squeeze.look()
    squeeze.look()
    assert pool.free == []
    scheduler.running = scheduler.running[1:]
    squeeze.look()
    assert pool.free == [1, 2, 3]
    wanted = False
    scheduler.running = decoding(2)
    squeeze.look()
    assert pool.free == [1, 2, 3]
