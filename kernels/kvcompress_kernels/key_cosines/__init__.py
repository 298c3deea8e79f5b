"""Cosine between each cached key and the mean key direction."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_floats, check_pages, require


def key_cosines(key_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the cosine of each key with the mean key direction (KeyDiff, arXiv:2504.15364).

    ``a_g = mean_j k_j / |k_j|`` of each KV head, then ``c[g, j] = cos(k_j, a_g)``. Norms are
    clamped at 1e-12, so a zero key has cosine 0. Equal keys have equal cosines at any position, and
    results are the same in every run.

    Args:
        key_pages: ``[N, Hkv, D, block_size]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order.
        tokens: prompt tokens, all of which enter the mean.

    Returns:
        ``[Hkv, tokens]`` float32 in [-1, 1], up to rounding. The scale of a quantised K cancels.

    Raises:
        ValueError: Shapes disagree, `tokens` is 0, or `key_pages` has no float dtype.
    """
    name = "key_cosines"
    require(key_pages.dim() == 4, name, "key_pages must be [N, Hkv, D, bs]", tuple(key_pages.shape))
    check_floats(name, "key_pages", key_pages)
    require(tokens > 0, name, "tokens must be positive", tokens)
    check_pages(name, pages, tokens, key_pages.shape[3])
    if contract.runs_triton(key_pages):
        from kvcompress_kernels.key_cosines.triton import run
    else:
        from kvcompress_kernels.key_cosines.cpu import run

    return run(key_pages, pages, tokens)
