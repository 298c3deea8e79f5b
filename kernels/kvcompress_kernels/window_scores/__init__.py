"""Attention from the observation window to the prompt."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_keys, check_pages, check_tensor, require
from kvcompress_kernels.packed_attention.offsets import Offsets
from kvcompress_kernels.window_scores.result import Outputs, WindowScores

__all__ = ["WindowScores", "window_scores_of_rows"]

_NAME = "window_scores"


def window_scores_of_rows(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float | torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    variance: bool,
    maximum: bool = False,
    pooled: bool = False,
    last: bool = True,
    grouped: bool = False,
    sinks: torch.Tensor | None = None,
    row_log_sums: torch.Tensor | None = None,
    offsets: Offsets | None = None,
) -> WindowScores:
    """Return the attention of each row's last w queries to its tokens, reduced over the queries.

    A row is one layer of one request. ``A = softmax(scale * q k^T)`` over all its keys, causal, in
    float32. The columns before the window are the past; they are not renormalised (CAKE,
    arXiv:2503.12491, eq. 5 to 7; SnapKV, arXiv:2404.14469). Query head h reads KV head
    ``h // (Hq // Hkv)``.

    With `pooled`, each query's attention is pooled before the maximum, as in DefensiveKV (Feng et
    al. 2025, arXiv:2510.13334). The attention a over the past becomes
    ``p[j] = sum_{|n - j| <= 2} a[n] / 5`` with zeros outside, then ``p * sum(a) / sum(p)``, so that
    it keeps its sum. A query without attention to the past stays 0.

    On a GPU all rows share their launches. Lengths stay on the device, so the call does not sync. A
    row's `total`, `variance`, `recent`, `last` and `maximum` equal those of a call with that row
    alone bit for bit. Entropy and shift may differ in their order of summation.

    Args:
        query: ``[N, w, Hq, D]`` any float dtype, rotated, in position order.
        key_pages: ``[pages, Hkv, D, block_size]`` any float dtype and strides.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each row's pages in order. Pages past a
            row's length are not read, and slots of its last page past it affect no result.
        tokens: length of all rows, including the window, or an upper bound on `lengths`.
        scale: factor on the logits, usually ``D ** -0.5``, times the scale of a quantised K: one
            for all rows, or ``[N]`` float32 with one positive factor per row (unchecked).
        lengths: ``[N]`` int32: w <= length <= tokens (unchecked, because a check would sync). A row
            of length w has no past.
        variance: also return the variance; needs ``w >= 2``.
        maximum: also return the maximum over the queries.
        pooled: return the maximum over the pooled queries; needs `maximum`.
        last: return the attention of the last query.
        grouped: return one line per KV head instead of one per query head. It is the mean over the
            KV head's query heads; in `maximum` it is their maximum.
        sinks: ``[N, Hq]`` float32 attention sink logits, or None. A sink adds a term to each
            query's softmax sum, so that its attention sums to less than 1 (gpt-oss; a logit of 0 is
            the SoftMax-off-by-one of Xiao et al. 2024, arXiv:2309.17453).
        row_log_sums: ``[N, Hq, w]`` float32, the natural logarithm of each query's softmax sum over
            its causal keys, ``log sum_j exp(scale * q k_j)``, as FlashAttention returns it; or
            None. With it, a GPU reads K once instead of twice. The GPU checks each query's
            attention sum, and scores a layer again without these values if a sum differs from 1 by
            more than 5e-5. Smaller errors stay in the scores. Unused with `sinks` or `pooled`.
        offsets: where a page stores K of a head, if `key_pages` is not a strided view of it. Then
            only its shape, first two strides and start count. Needs a CPU.

    Returns:
        The reductions of all rows. A shorter row is 0 in `total` and `variance` from column
        ``lengths[r] - w`` on, and in `last` and `maximum` from column ``lengths[r]`` on.

    Raises:
        ImportError: The op runs on a CPU without numba.
        ValueError: Shapes or dtypes disagree, N is 0, the window is empty or as long as the prompt,
            `variance` is set for a single query, or `pooled` is set without `maximum`.
    """
    require(query.dim() == 4, _NAME, "query must be [N, w, Hq, D]", tuple(query.shape))
    rows, w, heads, dim = query.shape
    require(rows > 0, _NAME, "there must be at least one row", rows)
    check_keys(_NAME, key_pages)
    _, kv_heads, key_dim, block = key_pages.shape
    require(key_dim == dim, _NAME, f"key_pages must have head dim {dim}", key_pages.shape)
    require(heads % kv_heads == 0, _NAME, f"Hq must be a multiple of Hkv={kv_heads}", heads)
    require(0 < w < tokens, _NAME, "0 < window < tokens must hold", (w, tokens))
    check_pages(_NAME, pages, tokens, block, rows)
    if isinstance(scale, torch.Tensor):
        right = scale.shape == (rows,) and scale.dtype == torch.float32
        got = tuple(scale.shape), scale.dtype
        require(right, _NAME, f"scale must be a number or [{rows}] float32", got)
    if lengths is not None:
        check_tensor(_NAME, "lengths", lengths, (rows,), torch.int32)
    if sinks is not None:
        check_tensor(_NAME, "sinks", sinks, (rows, heads), torch.float32)
    if row_log_sums is not None:
        check_tensor(_NAME, "row_log_sums", row_log_sums, (rows, heads, w), torch.float32)
    require(w > 1 or not variance, _NAME, "a variance needs a window of at least 2", w)
    require(maximum or not pooled, _NAME, "pooled needs maximum", (pooled, maximum))
    outputs = Outputs(variance, maximum, pooled, last, grouped)
    arguments = query, key_pages, pages, tokens, scale, lengths, outputs, sinks
    if contract.runs_triton(query):
        from kvcompress_kernels.window_scores.triton import run_rows

        require(offsets is None, _NAME, "on a GPU offsets must be None", offsets)
        return run_rows(*arguments, row_log_sums)
    from kvcompress_kernels.window_scores import cpu

    return cpu.run_rows(*arguments, offsets)
