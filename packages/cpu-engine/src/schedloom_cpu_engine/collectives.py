"""Exchanges of uneven parts, which vLLM's communicator for CPUs lacks: the data-parallel ranks of a mixture of experts
tell each other their tokens by them in every step.
"""

from typing import Any

import torch
from torch import Tensor, distributed


def complete(communicator: Any) -> None:
    """Adds the two exchanges to the class `communicator`, unless it has them by now."""
    for exchange in (all_gatherv, reduce_scatterv):
        if exchange.__name__ not in vars(communicator):
            setattr(communicator, exchange.__name__, exchange)


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The parts of all ranks, one behind the other along dimension 0; of a list, each of its tensors."""
    if isinstance(input_, list | tuple):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    assert dim == 0, "only parts along dimension 0 are uneven"
    own = input_.contiguous()
    parts = [own.new_empty((size, *own.shape[1:])) for size in sizes or [len(own)] * self.world_size]
    parts[self.rank_in_group].copy_(own)
    for rank, part in zip(self.ranks, parts, strict=True):
        distributed.broadcast(part, src=rank, group=self.device_group)
    return torch.cat(parts)


def reduce_scatterv(self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
    """This rank's part, along dimension 0, of the sum of what all ranks have."""
    assert dim == 0, "only parts along dimension 0 are uneven"
    total = input_.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes or len(total) // self.world_size)[self.rank_in_group].contiguous()
