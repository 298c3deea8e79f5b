"""What methods remember of answers that grow, beside what the cache holds of their tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvcompress.methods.spans import Spans


class AttentionSums:
    """Attention that was paid to every token in the page pool, added up: a float32 beside each.

    Per KV head, the mean over its query heads (H2O, docs/methods.md 7). A page's sums move with its
    tokens. What was never written, or belonged to a request that has gone, is read by nobody.

    Args:
        pages: flat pages of the pool's blocks ``[L, num_blocks]`` int64.
        named: flat pages that the pool has, those that are no block's included.
    """

    def __init__(self, pages: torch.Tensor, named: int, kv_heads: int, block_size: int) -> None:
        self.kv_heads = kv_heads
        count, device = pages.numel(), pages.device
        self._sums = torch.zeros(count, kv_heads, block_size, device=device)
        # In some layouts most flat ids are no page: sums lie side by side all the same.
        self._place: torch.Tensor | None = None
        if named != count:
            self._place = torch.zeros(named, dtype=torch.int32, device=device)
            every = torch.arange(count, dtype=torch.int32, device=device)
            self._place[pages.flatten()] = every

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """``[N, Hkv, W * bs]`` float32 of the tokens in flat pages ``[N, W]``."""
        return self._sums[self._at(pages)].transpose(1, 2).flatten(2)

    def write(self, pages: torch.Tensor, counts: torch.Tensor, sums: torch.Tensor) -> None:
        """Set the sums of the first ``counts[r]`` pages of each row.

        Args:
            pages: ``[N, W]`` integers, flat.
            counts: ``[N]``, likewise.
            sums: ``[N, Hkv, <= W * bs]`` float32: of the tokens of the first pages, in order; the
                last one may be short.
        """
        size = self._sums.shape[2]
        width = -(-sums.shape[2] // size)
        missing = width * size - sums.shape[2]
        if missing:
            sums = pad(sums, (0, missing))
        column = torch.arange(width, device=pages.device)
        # page 0 is the null block's, of which nobody reads
        at = pages[:, :width].where(column < counts[:, None], 0)
        self._sums[self._at(at)] = sums.unflatten(2, (width, size)).transpose(1, 2)

    def _at(self, pages: torch.Tensor) -> torch.Tensor:
        flat = pages.long()
        return flat if self._place is None else self._place[flat].long()


class Protected(NamedTuple):
    """Where protected tokens lie in what was packed of one request.

    Args:
        settled: tokens of the request before this; of the later ones nothing was dropped.
        spans: the protected ones before it.
        starts: ``[L, Hkv, n]`` int32, ascending: the slots of their first tokens.
    """

    settled: int
    spans: Spans
    starts: torch.Tensor


class Thresholds:
    """Per request slot, layer and KV head: how near what is dropped must be, to be merged (D2O).

    Args:
        slots: request slots, slot 0 among them.
    """

    def __init__(self, slots: int, layers: int, kv_heads: int, device: torch.device) -> None:
        self._values = torch.full((slots, layers, kv_heads), torch.nan, device=device)

    def reset(self, slot: int) -> None:
        """Forget the thresholds of a slot that a new request gets."""
        self._values[slot] = torch.nan

    def read(self, slots: Sequence[int]) -> torch.Tensor:
        """``[R, L, Hkv]`` float32, NaN where nothing was dropped yet."""
        values: torch.Tensor = self._values[self._at(slots)]
        return values

    def write(self, slots: Sequence[int], values: torch.Tensor) -> None:
        """Set the thresholds of some requests to `values` ``[R, L, Hkv]``."""
        self._values[self._at(slots)] = values

    def _at(self, slots: Sequence[int]) -> torch.Tensor:
        at = async_tensor_h2d(list(slots), device=self._values.device, dtype=torch.int64)
        assert isinstance(at, torch.Tensor)
        return at
