"""Where an ordinary page stores the keys and values of a head."""

from typing import NamedTuple

import torch

from kvcompress_kernels.contract import require


class Offsets(NamedTuple):
    """Offsets in elements from the start of a head's part of a page; all are int32.

    Element d of token t is at ``tokens[t] + dims[d]``, for K and for V.
    """

    key_tokens: torch.Tensor
    """``[block_size]``."""
    key_dims: torch.Tensor
    """``[D]``."""
    value_tokens: torch.Tensor
    """``[block_size]``."""
    value_dims: torch.Tensor
    """``[D]``."""


def check_offsets(op: str, offsets: Offsets, pages: torch.Tensor) -> None:
    """Raise ``ValueError`` unless `offsets` fit the pages ``[N, Hkv, block_size, 2 * D]``."""
    block, width = pages.shape[2:]
    rule = "with offsets, the part of each head in a page must be contiguous"
    require(pages.stride(2) == width, op, rule, pages.stride())
    for field, size in zip(Offsets._fields, (block, width // 2) * 2, strict=True):
        x = getattr(offsets, field)
        ok = x.dtype == torch.int32 and x.shape == (size,) and x.is_contiguous()
        rule = f"offsets.{field} must be contiguous int32 [{size}]"
        require(ok, op, rule, (x.dtype, tuple(x.shape)))
