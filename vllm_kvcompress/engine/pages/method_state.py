"""State that methods keep for requests that are packed again, outside the KV cache."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad
from vllm.utils.torch_utils import async_tensor_h2d


class AttentionSums:
    """Accumulated attention of every token in the page pool, one float32 per KV head.

    Each sum is the mean over the query heads of a KV head (H2O, docs/methods.md 7). When a token
    moves to another page, its sum moves too. Sums of free or unwritten slots are never read.

    Args:
        pages: ``[L, num_blocks]`` int64, flat pages of the pool's blocks.
        num_flat_ids: flat page ids of the pool, including ids that belong to no block.
        kv_heads: KV heads of a layer.
        block_size: tokens in a page.
    """

    def __init__(
        self, pages: torch.Tensor, num_flat_ids: int, kv_heads: int, block_size: int
    ) -> None:
        self.kv_heads = kv_heads
        count, device = pages.numel(), pages.device
        self._sums = torch.zeros(count, kv_heads, block_size, device=device)
        # In some cache layouts most flat ids belong to no block; `_sums` skips these ids.
        self._index_of_page: torch.Tensor | None = None
        if num_flat_ids != count:
            self._index_of_page = torch.zeros(num_flat_ids, dtype=torch.int32, device=device)
            indices = torch.arange(count, dtype=torch.int32, device=device)
            self._index_of_page[pages.flatten()] = indices

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the sums ``[N, Hkv, W * bs]`` float32 of the tokens in flat pages ``[N, W]``."""
        return self._sums[self._indices(pages)].transpose(1, 2).flatten(2)

    def write(self, pages: torch.Tensor, counts: torch.Tensor, sums: torch.Tensor) -> None:
        """Set the sums of the first ``counts[r]`` pages of each row.

        Args:
            pages: ``[N, W]`` integers, flat pages.
            counts: ``[N]`` integers, pages to write in each row.
            sums: ``[N, Hkv, <= W * bs]`` float32, sums of the first pages' tokens, in order. The
                last page may be partial.
        """
        size = self._sums.shape[2]
        width = -(-sums.shape[2] // size)
        missing = width * size - sums.shape[2]
        if missing:
            sums = pad(sums, (0, missing))
        column = torch.arange(width, device=pages.device)
        # Page 0 belongs to the null block, whose sums are never read.
        written = pages[:, :width].where(column < counts[:, None], 0)
        self._sums[self._indices(written)] = sums.unflatten(2, (width, size)).transpose(1, 2)

    def _indices(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the index in `_sums` of each flat page, int64."""
        flat = pages.long()
        return flat if self._index_of_page is None else self._index_of_page[flat].long()


class Thresholds:
    """Similarity thresholds for merging dropped tokens (D2O), by request slot, layer and KV head.

    Args:
        slots: request slots, including slot 0.
        layers: layers on this worker.
        kv_heads: KV heads of a layer.
        device: device of the thresholds.
    """

    def __init__(self, slots: int, layers: int, kv_heads: int, device: torch.device) -> None:
        self._values = torch.full((slots, layers, kv_heads), torch.nan, device=device)

    def reset(self, slot: int) -> None:
        """Clear the thresholds of a slot before a new request uses it."""
        self._values[slot] = torch.nan

    def read(self, slots: Sequence[int]) -> torch.Tensor:
        """Return thresholds ``[R, L, Hkv]`` float32, NaN for rows that have dropped no token."""
        values: torch.Tensor = self._values[self._indices(slots)]
        return values

    def write(self, slots: Sequence[int], values: torch.Tensor) -> None:
        """Set the thresholds of the slots to `values` ``[R, L, Hkv]``."""
        self._values[self._indices(slots)] = values

    def _indices(self, slots: Sequence[int]) -> torch.Tensor:
        """Copy slot numbers to the device without a sync."""
        indices = async_tensor_h2d(list(slots), device=self._values.device, dtype=torch.int64)
        assert isinstance(indices, torch.Tensor)
        return indices
