"""Dequantise packed pages of the format `k4v3` into ordinary pages."""

import torch

from kvcompress_kernels import contract, k4v3
from kvcompress_kernels.contract import require
from kvcompress_kernels.packed_attention.offsets import Offsets, check_offsets

_NAME = "dequantise_pages"
_FLOATS = torch.bfloat16, torch.float16, torch.float32


def dequantise_pages(
    pages: torch.Tensor,
    offsets: Offsets | None,
    packed: torch.Tensor,
    destinations: torch.Tensor,
) -> None:
    """Write the tokens of n full packed pages into ordinary pages, in the cache's dtype.

    Tokens fill the destination pages in order. A number is rounded to the cache's dtype and
    saturates at its largest number. On a GPU this is one launch without a copy, sync or allocation.

    Args:
        pages: ``[N, Hkv, block_size, 2 * D]`` bfloat16, float16 or float32, with packed and
            ordinary pages. Only the last axis must be contiguous. `k4v3` defines the bytes of a
            packed page.
        offsets: where an ordinary page stores K and V of a head. None if a token's row is its K,
            then its V. Other layouts need a CPU and pages with a contiguous part per head.
        packed: ``[n]`` int32: packed pages whose groups are all full.
        destinations: ``[n * page_tokens / block_size]`` int32: distinct ordinary pages, none of
            which is in `packed` (unchecked, because a check would sync). `k4v3.page_tokens` is the
            number of tokens of a packed page.

    Raises:
        ValueError: Shapes, dtypes or strides disagree, or the pages cannot hold groups.
        ImportError: The op runs on a CPU without numba.
    """
    triton = contract.runs_triton(pages)
    require(not triton or offsets is None, _NAME, "on a GPU offsets must be None", offsets)
    require(pages.dtype in _FLOATS, _NAME, f"pages must be one of {list(_FLOATS)}", pages.dtype)
    right = pages.dim() == 4 and pages.shape[3] % 2 == 0 and pages.stride(3) == 1
    rule = "pages must be [N, Hkv, block_size, 2 * D] with a dense last axis"
    require(right, _NAME, rule, (tuple(pages.shape), pages.stride()))
    block, dim = pages.shape[2], pages.shape[3] // 2
    refusal = k4v3.refusal(dim, block, pages.itemsize)
    require(not refusal, _NAME, refusal, (dim, block, pages.dtype))
    count = len(packed) * k4v3.page_tokens(block, pages.itemsize) // block
    for name, x, size in (("packed", packed, len(packed)), ("destinations", destinations, count)):
        right = x.dtype == torch.int32 and x.shape == (size,) and x.is_contiguous()
        require(right, _NAME, f"{name} must be contiguous int32 [{size}]", (x.dtype, x.shape))
    if offsets is not None:
        check_offsets(_NAME, offsets, pages)
    if triton:
        from kvcompress_kernels.dequantise_pages.triton import run
    else:
        from kvcompress_kernels.dequantise_pages.cpu import run
    run(pages, offsets, packed, destinations)
