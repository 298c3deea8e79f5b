"""Cosine between each cached key and the mean key direction."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_keys, check_row_pages


def key_cosines_of_rows(key_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the cosine of each key with the mean key direction (KeyDiff, arXiv:2504.15364).

    A row is one layer of one request. ``a_g = mean_j k_j / |k_j|`` of each row and KV head, then
    ``c[g, j] = cos(k_j, a_g)``. Norms are clamped at 1e-12, so a zero key has cosine 0. Equal keys
    of a row have equal cosines at any position, and results are the same in every run. A row's
    cosines equal those of a call with that row alone, bit for bit. The number of launches does not
    depend on N.

    Args:
        key_pages: ``[pages, Hkv, D, block_size]`` any float dtype and strides.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each row's pages in order.
        tokens: tokens of every row, all of which enter the mean.

    Returns:
        ``[N, Hkv, tokens]`` float32 in [-1, 1], up to rounding. The scale of a quantised K cancels.

    Raises:
        ValueError: Shapes disagree, N or `tokens` is 0, or `key_pages` has no float dtype.
    """
    check_keys("key_cosines", key_pages)
    check_row_pages("key_cosines", pages, tokens, key_pages.shape[3])
    if contract.runs_triton(key_pages):
        from kvcompress_kernels.key_cosines.triton import run_rows
    else:
        from kvcompress_kernels.key_cosines.cpu import run_rows

    return run_rows(key_pages, pages, tokens)
