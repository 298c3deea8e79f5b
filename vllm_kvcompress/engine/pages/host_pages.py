"""Copies of preempted requests' pages in host memory, from which the requests resume."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_kvcompress.engine.messages.step import ParkPages, ResumePages
from vllm_kvcompress.engine.pages.pool import PackedBlocks, PagePool
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.memory import HOST_SLOT_BLOCKS


class _PageCounts(NamedTuple):
    """How the layers of a parked request divide its packed pages, on the device."""

    pages: torch.Tensor
    """``[1, L]`` int32."""
    group_tokens: torch.Tensor | None
    """``[1, L]`` int32: tokens of each layer, if the pages hold groups."""


class HostPages:
    """Slots of host memory, which is allocated once and, for a GPU, pinned.

    All copies run in the order of the device's stream, so a block or a slot may be reused in the
    step that copies it. The host does not wait.

    Args:
        pool: the page pool of this worker's layers.
        num_slots: slots. Each holds the pages of HOST_SLOT_BLOCKS blocks.
    """

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        self._pool = pool
        self._layers = len(pool.layer_offset)
        self._slot_pages = HOST_SLOT_BLOCKS * self._layers
        page, pages = pool.pages.shape[1:], pool.pages
        # Zeros, so that the memory is the process's own from the start.
        self._host = torch.zeros(num_slots, self._slot_pages, *page, dtype=pages.dtype)
        if pages.is_cuda:
            pin(self._host)
        # Pages on their way. Copies to and from pinned memory are fast only if contiguous.
        self._staging = torch.empty(self._slot_pages, *page, dtype=pages.dtype, device=pages.device)
        self._counts: dict[str, _PageCounts] = {}

    def __len__(self) -> int:
        """Return the number of parked requests."""
        return len(self._counts)

    def park(self, order: ParkPages) -> None:
        """Copy the pages of a preempted request, which still has its slot in the page pool."""
        pages, counts, group_tokens = self._pool.layer_pages(order.request_id)
        # Layer by layer, as `PagePool.assign` divides the pages of blocks.
        column = torch.arange(order.max_layer_pages, device=pages.device)
        start = counts.cumsum(0) - counts
        index = (start[:, None] + column).where(column < counts[:, None], order.packed_pages)
        packed = pages.new_zeros(order.packed_pages + 1)
        packed.scatter_(0, index.flatten(), pages[:, : order.max_layer_pages].flatten())
        ordinary = self._pool.destination(order.blocks)
        sources = torch.cat([packed[: order.packed_pages].long(), ordinary])
        for part, slot, staging in self._copies(sources, order.slots):
            torch.index_select(self._pool.pages, 0, part, out=staging)
            slot.copy_(staging, non_blocking=True)
        self._counts[order.request_id] = _PageCounts(
            counts.clone()[None], None if group_tokens is None else group_tokens.clone()[None]
        )

    def resume(self, order: ResumePages) -> None:
        """Give a parked request a slot in the page pool again, and copy its pages back."""
        pool, counts = self._pool, self._counts.pop(order.request_id)
        blocks = PackedBlocks(order.request_id, order.destination, order.first_block)
        ordinary = pool.destination(order.blocks)
        leading = ordinary[: self._layers][None] if order.leading_blocks else None
        pool.assign([blocks], counts.pages, counts.group_tokens, leading)
        packed = pool.destination(order.destination)[: order.packed_pages]
        for part, slot, staging in self._copies(torch.cat([packed, ordinary]), order.slots):
            staging.copy_(slot, non_blocking=True)
            pool.pages.index_copy_(0, part, staging)

    def _copies(
        self, pages: torch.Tensor, slots: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield flat pages, their place in host memory and their place in the staging buffer."""
        for part, slot in zip(pages.split(self._slot_pages), slots, strict=False):
            yield part, self._host[slot, : len(part)], self._staging[: len(part)]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget the copies of requests that have ended or that start again."""
        for request_id in request_ids:
            self._counts.pop(request_id, None)


def pin(host: torch.Tensor) -> None:
    """Pin the memory of a CPU tensor. torch's own pinned memory takes a power of two of bytes.

    Raises:
        ConfigError: the system does not let the process pin so much memory.
    """
    error = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    if error.value:
        raise ConfigError(
            f"--kv-park memory must be pinned, and CUDA returned {error} for"
            f" {host.nbytes / 2**30:.1f} GiB; lower --kv-park, or raise the limit of locked memory"
            " (ulimit -l)"
        )
