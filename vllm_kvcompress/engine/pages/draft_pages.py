"""Packed pages of a draft model's layers, which share the target's blocks and keep every token.

vLLM keeps a draft layer's cache in the target's blocks. When a prompt is packed and its blocks are
freed, the draft's pages move to the last pages of the destination blocks, behind those of the
target's layers. Their number depends only on lengths.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcompress_kernels.page_tables import page_tables


class DraftMove(NamedTuple):
    """A copy of whole pages of N rows, where a row is one draft layer of one request."""

    pages: torch.Tensor
    """``[N, n]`` int64: flat pages to read."""
    counts: torch.Tensor
    """``[N]`` int32: pages of each row."""
    targets: torch.Tensor
    """``[N, n]`` int32: flat pages to write."""
    total: int
    """Sum of `counts`."""


class DraftPages:
    """Tracks the packed pages of each compressed request in each draft layer.

    Requests have the slots of the page pool.

    Args:
        layer_offset: ``[D]`` int32, flat page of block 0 in each draft layer.
        block_stride: flat pages between block b and b + 1 of one layer.
        slots: request slots, including slot 0 for uncompressed requests.
        max_rows: rows of the largest batch, including padding.
        max_blocks: maximum pages per request and layer.
        block_size: tokens in a page.
    """

    def __init__(
        self,
        layer_offset: torch.Tensor,
        block_stride: int,
        *,
        slots: int,
        max_rows: int,
        max_blocks: int,
        block_size: int,
    ) -> None:
        self.num_layers = len(layer_offset)
        self._layer_offset, self._block_stride = layer_offset.contiguous(), block_stride
        self._block_size = block_size
        layers, device = self.num_layers, layer_offset.device
        self._packed = torch.zeros(slots, layers, max_blocks, dtype=torch.int32, device=device)
        self._num_packed = torch.zeros(slots, layers, dtype=torch.int32, device=device)
        # A draft layer drops no token. So it has as many packed pages as blocks were packed.
        self._first_block = torch.zeros(slots, dtype=torch.int32, device=device)
        # Host copy of `_first_block`.
        self._packed_pages = [0] * slots
        # Attention reads these. Their addresses never change, because CUDA graphs record them.
        self._tables = torch.zeros(layers, max_rows, max_blocks, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(layers, max_rows, dtype=torch.int32, device=device)

    def reset(self, slot: int) -> None:
        """Make a slot read only its ordinary blocks."""
        self._write(slot, 0)

    def _write(self, slot: int, pages: int) -> None:
        self._packed_pages[slot] = pages
        self._num_packed[slot].fill_(pages)
        self._first_block[slot].fill_(pages)

    def source(self, slot: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return the flat pages ``[D, n]`` int64 with the tokens of a request's first n blocks.

        Args:
            slot: slot of the request.
            blocks: ``[n]`` int64, vLLM block ids; null blocks stand for packed ones.
        """
        pages = blocks * self._block_stride + self._layer_offset[:, None]
        packed = self._packed_pages[slot]
        pages[:, :packed] = self._packed[slot, :, :packed]
        return pages

    def assign(self, slot: int, leading: torch.Tensor, targets: torch.Tensor) -> None:
        """Let a slot read its leading pages, then packed pages, and then its blocks.

        Args:
            slot: slot of the request.
            leading: ``[D, l]`` integers, flat pages of ordinary blocks before the packed pages.
            targets: ``[D, n]`` int32, flat pages.
        """
        first, pages = leading.shape[1], leading.shape[1] + targets.shape[1]
        self._packed[slot, :, :first] = leading
        self._packed[slot, :, first:pages] = targets
        self._write(slot, pages)

    def tables(
        self,
        row_slots: torch.Tensor,
        live: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: int,
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Refresh every draft layer's table and lengths for a batch, without a sync.

        Args:
            row_slots: ``[>= live]`` int32, the slot of each row.
            live: ``[]`` int32, rows of the batch.
            block_table: ``[>= live, W]`` int32, vLLM's block ids.
            seq_lens: ``[>= live]`` int32, in tokens.
            rows: rows of the batch, including padding, which gets length 0.

        Returns:
            Per layer ``[rows, W]`` int32 flat pages, and ``[rows]`` int32 tokens.
        """
        page_tables(
            block_table,
            seq_lens,
            self._packed,
            self._num_packed,
            self._first_block,
            self._layer_offset,
            self._block_stride,
            self._block_size,
            row_slots,
            live,
            self._tables,
            self._lengths,
        )
        return self._tables[:, :rows].unbind(), self._lengths[:, :rows].unbind()
