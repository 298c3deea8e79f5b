"""L1 norm of each cached value."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_floats, check_pages, check_row_pages, require

_NAME = "value_norms"


def value_norms(value_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the L1 norm of each cached value: ``n[g, j] = sum_d |v[g, j, d]|``, in float32.

    Equal values have equal norms at any position.

    Args:
        value_pages: ``[N, Hkv, block_size, D]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order.
        tokens: prompt tokens.

    Returns:
        ``[Hkv, tokens]`` float32. For a quantised V, multiply by its scale to compare layers.

    Raises:
        ValueError: Shapes disagree, `tokens` is 0, or `value_pages` has no float dtype.
    """
    _check(value_pages, pages, tokens)
    return _run_rows(value_pages, pages[None], tokens)[0]


def value_norms_of_rows(
    value_pages: torch.Tensor, pages: torch.Tensor, tokens: int
) -> torch.Tensor:
    """Return the `value_norms` of N rows. A row is one layer of one request.

    A row's norms equal those of a call with that row alone, bit for bit. One launch computes all
    rows.

    Args:
        value_pages: as in `value_norms`.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each row's pages in order.
        tokens: tokens of every row.

    Returns:
        ``[N, Hkv, tokens]`` float32, as in `value_norms`.

    Raises:
        ValueError: As in `value_norms`, or N is 0.
    """
    check_row_pages(_NAME, pages)
    _check(value_pages, pages, tokens, len(pages))
    return _run_rows(value_pages, pages, tokens)


def _check(value_pages: torch.Tensor, pages: torch.Tensor, tokens: int, *rows: int) -> None:
    got = tuple(value_pages.shape)
    require(value_pages.dim() == 4, _NAME, "value_pages must be [N, Hkv, bs, D]", got)
    check_floats(_NAME, "value_pages", value_pages)
    require(tokens > 0, _NAME, "tokens must be positive", tokens)
    check_pages(_NAME, pages, tokens, value_pages.shape[2], *rows)


def _run_rows(value_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    if contract.runs_triton(value_pages):
        from kvcompress_kernels.value_norms.triton import run_rows
    else:
        from kvcompress_kernels.value_norms.cpu import run_rows

    return run_rows(value_pages, pages, tokens)
