"""Kept tokens, with the evicted ones folded into their nearest (D2O, arXiv:2406.13035).

Per KV head, each evicted token i has its nearest kept token ``near(i) = argmax_j u_ij`` (ties to
the earlier j), ``u_ij = cos(k_i, k_j)``, norms clamped at 1e-12. It is merged iff
``u_i = max_j u_ij`` is at least the mean of u over the evicted tokens, up to rounding, so that
equal cosines are all merged; else it is dropped. Of tokens that were packed before, the threshold
tau moves instead (eq. 10; several at once by their mean):
``tau <- beta mean_i(u_i) + (1 - beta) tau``. With e Euler's number and E_j merged into j, all at
once:
``k_j <- (e k_j + sum_{i in E_j} exp(u_i) k_i) / (e + sum_{i in E_j} exp(u_i))``, values likewise.
The paper's eq. 12 repeats the sum in its first weight, read as a typo here.
"""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_pages, require
from kvcompress_kernels.merge_evicted.result import Merged

__all__ = ["Merged", "merge_evicted"]


def merge_evicted(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    kept: torch.Tensor,
    counts: torch.Tensor,
    least: int = 1,
    values_only: bool = False,
    *,
    lengths: torch.Tensor | None = None,
    threshold: torch.Tensor | None = None,
    beta: float = 0.7,
) -> Merged:
    """Fold evicted tokens into the kept ones that their keys resemble, in N layers at once.

    Args:
        key_pages: ``[pages, Hkv, D, block_size]`` any float dtype and strides.
        value_pages: ``[pages, Hkv, block_size, Dv]`` likewise.
        pages: ``[N, ceil(tokens / block_size)]`` int64: for each of N layers, the prompt's pages
            in order.
        tokens: prompt tokens; those not kept are evicted.
        kept: ``[N, Hkv, n]`` int: kept positions per KV head, ascending, distinct, each below
            `tokens`; of row r the first ``counts[r]`` are read, values unchecked.
        counts: ``[N]`` int32: tokens that a row keeps, `least` to n; unchecked.
        least: a number of tokens that every row keeps, known to the host: the nearer, the less
            room and work are set aside for evicted tokens.
        values_only: keep the keys as they are; the values are folded as they are with the keys.
        lengths: ``[N]`` int32, tokens of each row, at most `tokens` (unchecked); pages behind them
            are not read. None: all have `tokens`.
        threshold: ``[N, Hkv]`` float32, tau so far; NaN, or None, where nothing was evicted yet.
        beta: weight of the tokens evicted now in a tau that moves.

    Returns:
        The kept tokens, and tau from now on. A token that nothing was merged into is its cached
        value bit for bit; with `values_only` every key is.

    Raises:
        ValueError: shapes disagree, nothing is kept, more is kept than there is, `lengths` or
            `threshold` is of another dtype, `beta` is no share, or the cache is quantised.
    """
    rows, heads = _check(key_pages, value_pages, pages, tokens, kept, counts, least)
    if lengths is None:
        lengths = torch.full((rows,), tokens, dtype=torch.int32, device=kept.device)
    if threshold is None:
        threshold = torch.full((rows, heads), torch.nan, device=kept.device)
    _check_moving(lengths, threshold, beta, rows, heads)
    if contract.triton_takes(key_pages):
        from kvcompress_kernels.merge_evicted.triton import run
    else:
        from kvcompress_kernels.merge_evicted.cpu import run

    return run(
        key_pages,
        value_pages,
        pages,
        tokens,
        kept,
        counts,
        least,
        values_only,
        lengths,
        threshold,
        beta,
    )


def _check(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    kept: torch.Tensor,
    counts: torch.Tensor,
    least: int,
) -> tuple[int, int]:
    """Check the cache and what is kept of it, and return the numbers of rows and KV heads."""
    name = "merge_evicted"
    require(key_pages.dim() == 4, name, "key_pages must be [N, Hkv, D, bs]", tuple(key_pages.shape))
    for pages_of in (key_pages, value_pages):
        rule = "takes no quantised cache: what is folded would have to be quantised anew"
        require(pages_of.element_size() > 1, name, rule, pages_of.dtype)
    blocks, heads, _, block = key_pages.shape
    require(
        value_pages.dim() == 4 and value_pages.shape[:3] == (blocks, heads, block),
        name,
        f"value_pages must be [{blocks}, {heads}, {block}, Dv]",
        tuple(value_pages.shape),
    )
    require(
        kept.dim() == 3 and kept.shape[1] == heads,
        name,
        f"kept must be [N, {heads}, n]",
        tuple(kept.shape),
    )
    rows, _, max_kept = kept.shape
    require(0 < max_kept <= tokens, name, "0 < n <= tokens must hold", (max_kept, tokens))
    require(0 < least <= max_kept, name, "0 < least <= n must hold", (least, max_kept))
    require(counts.shape == (rows,), name, f"counts must be [{rows}]", tuple(counts.shape))
    check_pages(name, pages, tokens, block, rows)
    return rows, heads


def _check_moving(
    lengths: torch.Tensor, threshold: torch.Tensor, beta: float, rows: int, heads: int
) -> None:
    """Check the lengths of the rows, and what the threshold moves by."""
    name = "merge_evicted"
    right = lengths.shape == (rows,) and lengths.dtype == torch.int32
    got = tuple(lengths.shape), lengths.dtype
    require(right, name, f"lengths must be [{rows}] int32", got)
    right = threshold.shape == (rows, heads) and threshold.dtype == torch.float32
    got = tuple(threshold.shape), threshold.dtype
    require(right, name, f"threshold must be [{rows}, {heads}] float32", got)
    require(0 <= beta <= 1, name, "beta must be in [0, 1]", beta)
