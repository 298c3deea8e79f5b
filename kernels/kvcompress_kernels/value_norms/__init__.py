"""L1 norm of each cached value."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_row_pages, check_values


def value_norms_of_rows(
    value_pages: torch.Tensor, pages: torch.Tensor, tokens: int
) -> torch.Tensor:
    """Return the L1 norm of each cached value: ``n[g, j] = sum_d |v[g, j, d]|``, in float32.

    A row is one layer of one request. Equal values have equal norms at any position and in any row,
    bit for bit, whatever the other rows hold. One launch computes all rows.

    Args:
        value_pages: ``[pages, Hkv, block_size, D]`` any float dtype and strides.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each row's pages in order.
        tokens: tokens of every row.

    Returns:
        ``[N, Hkv, tokens]`` float32. For a quantised V, multiply by its scale to compare layers.

    Raises:
        ValueError: Shapes disagree, N or `tokens` is 0, or `value_pages` has no float dtype.
    """
    check_values("value_norms", value_pages)
    check_row_pages("value_norms", pages, tokens, value_pages.shape[2])
    if contract.runs_triton(value_pages):
        from kvcompress_kernels.value_norms.triton import run_rows
    else:
        from kvcompress_kernels.value_norms.cpu import run_rows

    return run_rows(value_pages, pages, tokens)
