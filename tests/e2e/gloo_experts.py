"""Uneven collectives over gloo, which vLLM's CPU build lacks for data-parallel MoE models.

vLLM's CpuCommunicator has an all-to-all manager that calls `all_gatherv` and `reduce_scatterv`,
which only its CUDA communicator implements, over NCCL.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad


def all_gatherv(
    self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Return the concatenated rows of all ranks, of which rank r contributes ``sizes[r]``."""
    assert dim == 0
    if not isinstance(input_, torch.Tensor):
        return [all_gatherv(self, part, dim, sizes) for part in input_]
    sizes = sizes or [len(input_)] * self.world_size
    assert sizes[self.rank_in_group] == len(input_)
    padding = [0, 0] * (input_.dim() - 1) + [0, max(sizes) - len(input_)]
    padded = pad(input_, padding).contiguous()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks."""
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    assert sum(sizes) == len(input_)
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].clone()


def install(communicator: type) -> None:
    """Add those of both collectives to vLLM's CpuCommunicator that it does not have."""
    for collective in (all_gatherv, reduce_scatterv):
        if collective.__name__ not in vars(communicator):
            setattr(communicator, collective.__name__, collective)
