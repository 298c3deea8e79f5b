"""Scratch pages: dequantised copies of packed pages, read by later prefills.

A row of a batch is one request. `packed_attention` unpacks the packed pages of a row again for each
tile of its queries. On GPUs, and on CPUs with AMX, vLLM's own kernel should be faster with many
queries. So we dequantise the pages once per layer there, and vLLM's kernel reads the copies as
ordinary pages. Layers run one after another, so all of them share the scratch pages.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from kvcompress_kernels import k4v3

MIN_QUERIES = 32
"""Fewest queries of a row that reads copies. With fewer, `packed_attention` unpacks once."""


class ScratchRow(NamedTuple):
    """A batch row that reads copies of its packed pages."""

    row: int
    """Index in the batch."""
    slot: int
    """The request's slot."""
    read_slot: int
    """The slot whose pages the row reads in this step."""
    packed_pages: int
    """Packed pages of each layer."""
    pages: slice
    """Its scratch pages."""


class ScratchCopies(NamedTuple):
    """The packed pages that each layer dequantises before its attention runs."""

    packed: Sequence[torch.Tensor]
    """Per layer ``[n]`` int32: flat packed pages."""
    destinations: torch.Tensor
    """``[n * page_tokens / block_size]`` int32: flat scratch pages."""


class ScratchPages:
    """Divides the scratch pages among the rows of a batch.

    Args:
        pages: ``[n]`` int32: flat pages that hold no request's tokens.
        slots: slots of the page pool that no request has. A row with copies reads one of them.
        block_size: tokens in an ordinary page.
        itemsize: bytes of a cached number.
    """

    def __init__(
        self, pages: torch.Tensor, slots: Sequence[int], *, block_size: int, itemsize: int
    ) -> None:
        self.pages, self._slots = pages, slots
        self._page_tokens = k4v3.page_tokens(block_size, itemsize)
        self.ratio = self._page_tokens // block_size

    def rows(
        self, slots: Sequence[int], queries: Sequence[int], group_tokens: Mapping[int, int]
    ) -> Iterator[ScratchRow]:
        """Yield the rows that get scratch pages, in row order. Rows that do not fit are skipped.

        Args:
            slots: slot of each row.
            queries: queries of each row.
            group_tokens: by slot, the tokens in groups of each layer, if all layers have equally
                many.
        """
        read_slots, used = iter(self._slots), 0
        for row, (slot, count) in enumerate(zip(slots, queries, strict=False)):
            packed_pages = self.full_packed_pages(group_tokens.get(slot, 0), count)
            stop = used + packed_pages * self.ratio
            if not packed_pages or stop > len(self.pages):
                continue
            read_slot = next(read_slots, None)
            if read_slot is None:
                return
            yield ScratchRow(row, slot, read_slot, packed_pages, slice(used, stop))
            used = stop

    def full_packed_pages(self, group_tokens: int, queries: int) -> int:
        """Return how many packed pages to copy for a row; 0 if `packed_attention` should read it.

        `packed_attention` reads rows with few queries or a partly filled page.
        """
        if queries < MIN_QUERIES or group_tokens % self._page_tokens:
            return 0
        return group_tokens // self._page_tokens
