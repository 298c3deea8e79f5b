"""Cosine between each cached key and the mean key direction."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_floats, check_pages, check_row_pages, require

_NAME = "key_cosines"


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
    _check(key_pages, pages, tokens)
    return _run_rows(key_pages, pages[None], tokens)[0]


def key_cosines_of_rows(key_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the `key_cosines` of N rows. A row is one layer of one request.

    A row's cosines equal those of a call with that row alone, bit for bit. The number of launches
    does not depend on N.

    Args:
        key_pages: as in `key_cosines`.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each row's pages in order.
        tokens: tokens of every row.

    Returns:
        ``[N, Hkv, tokens]`` float32, as in `key_cosines`.

    Raises:
        ValueError: As in `key_cosines`, or N is 0.
    """
    check_row_pages(_NAME, pages)
    _check(key_pages, pages, tokens, len(pages))
    return _run_rows(key_pages, pages, tokens)


def _check(key_pages: torch.Tensor, pages: torch.Tensor, tokens: int, *rows: int) -> None:
    got = tuple(key_pages.shape)
    require(key_pages.dim() == 4, _NAME, "key_pages must be [N, Hkv, D, bs]", got)
    check_floats(_NAME, "key_pages", key_pages)
    require(tokens > 0, _NAME, "tokens must be positive", tokens)
    check_pages(_NAME, pages, tokens, key_pages.shape[3], *rows)


def _run_rows(key_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    if contract.runs_triton(key_pages):
        from kvcompress_kernels.key_cosines.triton import run_rows
    else:
        from kvcompress_kernels.key_cosines.cpu import run_rows

    return run_rows(key_pages, pages, tokens)
