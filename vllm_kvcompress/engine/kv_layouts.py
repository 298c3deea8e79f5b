"""How K and V lie inside a block, per attention backend.

Everything above this file sees two strided views of one page array: keys
``[N, Hkv, D, block_size]`` and values ``[N, Hkv, block_size, D]``.
"""

import torch

PageViews = tuple[torch.Tensor, torch.Tensor]


def cpu_attn(pages: torch.Tensor) -> PageViews:
    """CPU_ATTN with the `vec` and `vec16` kernels: K is transposed inside its half of a block.

    Args:
        pages: ``[N, Hkv, block_size, 2 * D]``; the last two axes contiguous. The first
            ``block_size * D`` elements of a head are K as ``[D, block_size]``, the rest V as
            ``[block_size, D]``.
    """
    count, heads, block, width = pages.shape
    dim = width // 2
    s_page, s_head = pages.stride()[:2]
    start = pages.storage_offset()
    keys = pages.as_strided((count, heads, dim, block), (s_page, s_head, block, 1), start)
    values = pages.as_strided(
        (count, heads, block, dim), (s_page, s_head, dim, 1), start + block * dim
    )
    return keys, values


def interleaved(pages: torch.Tensor) -> PageViews:
    """FLASH_ATTN and TRITON_ATTN: a token's K and V side by side, heads or tokens outermost.

    Args:
        pages: ``[N, Hkv, block_size, 2 * D]``, any strides: K in the first half of the last axis.
    """
    keys, values = pages.chunk(2, dim=-1)
    return keys.transpose(2, 3), values
