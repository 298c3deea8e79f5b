"""The flat page pool: every layer can read every page, and every layer has its own table.

A vLLM block id is L pages, one per layer, inside one backing allocation. One strided view over
that allocation makes the whole cache an array of ``L * num_blocks`` equal pages:

    flat page of (layer l, block b) = layer_offset[l] + block_stride * b
        layer-compact layouts:    l * num_blocks + b
        block-outermost layouts:  b * L + l
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from kvcompress_kernels import page_tables
from vllm_kvcompress.errors import SeamError


def flat_pages(layers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """One view over the caches of all layers.

    Args:
        layers: each layer's cache ``[num_blocks, ...]``, equal shapes and strides, views of one
            storage.

    Returns:
        The flat view ``[L * num_blocks, ...]``, `layer_offset` ``[L]`` int32 and `block_stride`.

    Raises:
        SeamError: the layers do not lie in one allocation at equal distances.
    """
    first = layers[0]
    blocks = first.shape[0]
    starts = [layer.storage_offset() for layer in layers]
    order = sorted(range(len(layers)), key=starts.__getitem__)
    one_storage = {layer.untyped_storage().data_ptr() for layer in layers}
    alike = {(layer.shape, layer.stride()) for layer in layers}
    gaps = {int(starts[b]) - int(starts[a]) for a, b in pairwise(order)}
    if len(one_storage) != 1 or len(alike) != 1 or len(gaps) > 1:
        raise SeamError(
            "compression needs all layers' KV caches in one allocation at equal distances; got"
            f" {len(one_storage)} allocations, {len(alike)} shapes, distances {sorted(gaps)}"
        )
    block_step = int(first.stride(0))
    layer_step = gaps.pop() if gaps else block_step * blocks
    if layer_step == block_step * blocks:
        page_step, offsets, block_stride = (
            block_step,
            [rank * blocks for rank in range(len(layers))],
            1,
        )
    elif block_step == layer_step * len(layers):
        page_step, offsets, block_stride = layer_step, list(range(len(layers))), len(layers)
    else:
        raise SeamError(
            "compression needs a layer-compact or a block-outermost KV cache; got layer stride"
            f" {layer_step} and block stride {block_step} for {len(layers)} layers of {blocks}"
        )
    flat = first.as_strided(
        (len(layers) * blocks, *first.shape[1:]),
        (page_step, *first.stride()[1:]),
        starts[order[0]],
    )
    layer_offset = torch.empty(len(layers), dtype=torch.int32, device=first.device)
    for rank, layer in enumerate(order):
        layer_offset[layer] = offsets[rank]
    return flat, layer_offset, block_stride


class PagePool:
    """Where each compressed request's kept tokens lie, per layer.

    Slot 0 belongs to every request that was not compressed: no packed pages.

    Args:
        layers: the layers' caches, in layer order (see `flat_pages`).
        max_requests: requests that may be compressed at once.
        max_blocks: blocks in the longest sequence.
    """

    def __init__(
        self, layers: Sequence[torch.Tensor], *, max_requests: int, max_blocks: int, block_size: int
    ) -> None:
        self.pages, self.layer_offset, self.block_stride = flat_pages(layers)
        self.block_size = block_size
        count, device = len(layers), self.pages.device
        self._packed = torch.zeros(
            max_requests + 1, count, max_blocks, dtype=torch.int32, device=device
        )
        self._num_packed = torch.zeros(max_requests + 1, count, dtype=torch.int32, device=device)
        self._first_block = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self._slots: dict[str, int] = {}
        self._free = list(range(max_requests, 0, -1))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def flat_ids(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Flat pages, int64, of vLLM block ids in one layer."""
        return blocks.long() * self.block_stride + self.layer_offset[layer]

    def destination(self, blocks: Sequence[int]) -> torch.Tensor:
        """All ``len(blocks) * L`` flat pages of some blocks, int64, block by block."""
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.pages.device)
        return (ids[:, None] * self.block_stride + self.layer_offset[None, :]).flatten()

    def admit(self, request_id: str, packed: Sequence[torch.Tensor], first_block: int) -> None:
        """From now on the request reads `packed` pages per layer, then blocks from `first_block`.

        Args:
            packed: per layer, flat pages ``[p_l]`` int64.
        """
        slot = self._slots[request_id] = self._free.pop()
        self._first_block[slot] = first_block
        counts = torch.tensor([len(pages) for pages in packed], dtype=torch.int32)
        self._num_packed[slot] = counts.to(self.pages.device)
        for layer, pages in enumerate(packed):
            self._packed[slot, layer, : len(pages)] = pages.to(torch.int32)

    def forget(self, request_id: str) -> None:
        """Drop a request that finished or was preempted; nothing happens if it is unknown."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)

    def slots(self, request_ids: Sequence[str]) -> list[int]:
        """The slot of each request of a batch; 0 where it was not compressed."""
        if not self._slots:
            return [0] * len(request_ids)
        find = self._slots.get
        return [find(request_id, 0) for request_id in request_ids]

    def tables(
        self, slots: list[int], block_table: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each layer's block table ``[L, R, W]`` and lengths ``[L, R]``, int32 (`page_tables`)."""
        rows = torch.tensor(slots, dtype=torch.int64, device=self.pages.device)
        width = block_table.shape[1]
        return page_tables(
            block_table,
            seq_lens,
            self._packed[rows, :, :width],
            self._num_packed[rows],
            self._first_block[rows],
            self.layer_offset,
            self.block_stride,
            self.block_size,
        )
