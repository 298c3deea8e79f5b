"""Merge evicted tokens into the kept tokens with the most similar keys (D2O, arXiv:2406.13035).

For each KV head, with ``u_ij = cos(k_i, k_j)`` and norms clamped at 1e-12:

1. Each evicted token i has a nearest kept token ``near(i) = argmax_j u_ij``. Ties go to the
   earlier j. ``u_i = max_j u_ij`` is its cosine.
2. The threshold tau is the mean of u_i over the evicted tokens. If the request was packed before,
   tau is instead updated (eq. 10, with the mean of this call's tokens):
   ``tau <- beta mean_i(u_i) + (1 - beta) tau``.
3. Token i is merged if ``u_i >= tau``, with a tolerance for rounding so that tokens of equal cosine
   are treated the same. Otherwise it is dropped.
4. With e Euler's number and E_j the tokens merged into j, both keys and values become
   ``k_j <- (e k_j + sum_{i in E_j} exp(u_i) k_i) / (e + sum_{i in E_j} exp(u_i))``.
   Eq. 12 of the paper repeats the sum in its first weight, which we take for a typo.
"""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_pages, check_same_pages, check_tensor, require
from kvcompress_kernels.merge_evicted.result import Merged

__all__ = ["Merged", "merge_evicted"]

_NAME = "merge_evicted"


def merge_evicted(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    kept: torch.Tensor,
    counts: torch.Tensor,
    min_kept: int = 1,
    values_only: bool = False,
    *,
    lengths: torch.Tensor | None = None,
    threshold: torch.Tensor | None = None,
    beta: float = 0.7,
) -> Merged:
    """Return the kept tokens of N rows, with the evicted tokens merged into them.

    A row is one layer of one request.

    Args:
        key_pages: ``[pages, Hkv, D, block_size]`` any float dtype and strides.
        value_pages: ``[pages, Hkv, block_size, Dv]`` any float dtype and strides.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each row's pages in order.
        tokens: prompt tokens. Tokens that are not kept are evicted.
        kept: ``[N, Hkv, n]`` int: kept positions of each KV head, ascending, distinct and below
            `tokens` (unchecked). The first ``counts[r]`` of row r are read.
        counts: ``[N]`` int32: kept tokens of each row, `min_kept` to n (unchecked).
        min_kept: lower bound on `counts` that the host knows. A tighter bound allocates less
            memory and launches fewer programs for evicted tokens.
        values_only: leave the keys unchanged and merge only the values, with the same weights.
        lengths: ``[N]`` int32, tokens of each row, at most `tokens` (unchecked). Pages past a row's
            length are not read. None means that all rows have `tokens` tokens.
        threshold: ``[N, Hkv]`` float32, tau of earlier calls, NaN for a head that never evicted.
            None means NaN for all.
        beta: weight of this call's mean in an updated tau, in [0, 1].

    Returns:
        The kept tokens and the new tau. Tokens that nothing was merged into equal their cached
        keys and values bit for bit. So do all keys with `values_only`. A row's result is
        bitwise the same whatever the other rows and the bounds `tokens`, n and `min_kept` are.

    Raises:
        ValueError: Shapes disagree, n is not in [1, tokens], `min_kept` is not in [1, n],
            `lengths` or `threshold` has the wrong dtype, `beta` is outside [0, 1], or the cache is
            quantised.
    """
    got = tuple(key_pages.shape)
    require(key_pages.dim() == 4, _NAME, "key_pages must be [N, Hkv, D, bs]", got)
    for cache in (key_pages, value_pages):
        rule = "the cache must not be quantised, because merged tokens would be quantised again"
        require(cache.element_size() > 1, _NAME, rule, cache.dtype)
    check_same_pages(_NAME, key_pages, value_pages)
    heads, block = key_pages.shape[1], key_pages.shape[3]
    right = kept.dim() == 3 and kept.shape[1] == heads
    require(right, _NAME, f"kept must be [N, {heads}, n]", tuple(kept.shape))
    rows, _, max_kept = kept.shape
    require(0 < max_kept <= tokens, _NAME, "0 < n <= tokens must hold", (max_kept, tokens))
    require(0 < min_kept <= max_kept, _NAME, "0 < min_kept <= n must hold", (min_kept, max_kept))
    require(counts.shape == (rows,), _NAME, f"counts must be [{rows}]", tuple(counts.shape))
    check_pages(_NAME, pages, tokens, block, rows)
    if lengths is None:
        lengths = torch.full((rows,), tokens, dtype=torch.int32, device=kept.device)
    if threshold is None:
        threshold = torch.full((rows, heads), torch.nan, device=kept.device)
    check_tensor(_NAME, "lengths", lengths, (rows,), torch.int32)
    check_tensor(_NAME, "threshold", threshold, (rows, heads), torch.float32)
    require(0 <= beta <= 1, _NAME, "beta must be in [0, 1]", beta)
    if contract.runs_triton(key_pages):
        from kvcompress_kernels.merge_evicted.triton import run
    else:
        from kvcompress_kernels.merge_evicted.cpu import run

    arguments = key_pages, value_pages, pages, tokens, kept, counts, min_kept
    return run(*arguments, values_only, lengths, threshold, beta)
