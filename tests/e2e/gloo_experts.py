"""What vLLM's CPU build lacks for data-parallel mixtures of experts: uneven collectives.

Its CpuCommunicator has an all-to-all manager for them, which calls `all_gatherv` and
`reduce_scatterv`; CUDA's communicator has both, over NCCL. These are the same over gloo.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad


def all_gatherv(
    self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Every rank's rows, ``sizes[rank]`` of each, one after the other."""
    assert dim == 0
    if not isinstance(input_, torch.Tensor):
        return [all_gatherv(self, part, dim, sizes) for part in input_]
    sizes = sizes or [len(input_)] * self.world_size
    assert sizes[self.rank_in_group] == len(input_)
    rows = [0, 0] * (input_.dim() - 1) + [0, max(sizes) - len(input_)]
    mine = pad(input_, rows).contiguous()
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over all ranks."""
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    assert sum(sizes) == len(input_)
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].clone()


def install(communicator: type) -> None:
    """Give vLLM's CpuCommunicator what it lacks of both."""
    for collective in (all_gatherv, reduce_scatterv):
        if collective.__name__ not in vars(communicator):
            setattr(communicator, collective.__name__, collective)
