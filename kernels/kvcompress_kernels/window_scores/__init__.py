"""Attention from the observation window to the prompt."""

from collections.abc import Sequence

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_floats, check_pages, require
from kvcompress_kernels.window_scores.result import Outputs, WindowScores

__all__ = [
    "WindowScores",
    "window_scores",
    "window_scores_of_layers",
    "window_scores_of_rows",
]

_NAME = "window_scores"


def window_scores(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    *,
    variance: bool,
    maximum: bool = False,
    pooled: bool = False,
    last: bool = True,
    grouped: bool = False,
    sinks: torch.Tensor | None = None,
) -> WindowScores:
    """Return the attention of the last w queries to the prompt, reduced over these w rows.

    ``A = softmax(scale * q k^T)`` over all `tokens` keys, causal, in float32. The columns before
    the window are the past; they are not renormalised (CAKE, arXiv:2503.12491, eq. 5 to 7; SnapKV,
    arXiv:2404.14469). Query head h reads KV head ``h // (Hq // Hkv)``.

    With `pooled`, each row is pooled before the maximum, as in DefensiveKV (Feng et al. 2025,
    arXiv:2510.13334). A row a over the past becomes ``p[j] = sum_{|n - j| <= 2} a[n] / 5`` with
    zeros outside, then ``p * sum(a) / sum(p)``, so that it keeps its sum. A row without attention
    to the past stays 0.

    Args:
        query: ``[w, Hq, D]`` any float dtype, rotated, in position order.
        key_pages: ``[N, Hkv, D, block_size]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order. Slots of the
            last page from `tokens` on affect no result.
        tokens: prompt length S, including the window.
        scale: factor on the logits, usually ``D ** -0.5``, times the scale of a quantised K.
        variance: also return the variance; needs ``w >= 2``.
        maximum: also return the maximum over the rows.
        pooled: return the maximum over the pooled rows; needs `maximum`.
        last: return the attention of the last row.
        grouped: return one line per KV head instead of one per query head. It is the mean over the
            KV head's query heads; in `maximum` it is their maximum.
        sinks: ``[Hq]`` float32 attention sink logits, or None. A sink adds a term to each row's
            softmax sum, so that the row's attention sums to less than 1 (gpt-oss; a logit of 0 is
            the SoftMax-off-by-one of Xiao et al. 2024, arXiv:2309.17453).

    Raises:
        ValueError: Shapes disagree, the window is empty or as long as the prompt, `variance`
            is set for a single row, or `pooled` is set without `maximum`.
    """
    (scores,) = window_scores_of_layers(
        [query],
        key_pages,
        pages[None],
        tokens,
        scale,
        variance=variance,
        maximum=maximum,
        pooled=pooled,
        last=last,
        grouped=grouped,
        sinks=None if sinks is None else sinks[None],
    )
    return scores


def window_scores_of_layers(
    queries: Sequence[torch.Tensor],
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float | torch.Tensor,
    *,
    variance: bool,
    maximum: bool = False,
    pooled: bool = False,
    last: bool = True,
    grouped: bool = False,
    sinks: torch.Tensor | None = None,
) -> list[WindowScores]:
    """Return the `window_scores` of N layers of one prompt. On a GPU they share their launches.

    Layers differ only in their page ids. A layer's `total`, `variance`, `recent`, `last` and
    `maximum` equal those of a call with that layer alone bit for bit. Entropy and shift may differ
    in their order of summation.

    Args:
        queries: N tensors ``[w, Hq, D]`` of one shape and dtype.
        key_pages: as in `window_scores`.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each layer's pages of the prompt in order.
        tokens: as in `window_scores`.
        scale: factor for all layers, or ``[N]`` float32 with one positive factor per layer.
        variance: as in `window_scores`.
        maximum: as in `window_scores`.
        pooled: as in `window_scores`.
        last: as in `window_scores`.
        grouped: as in `window_scores`.
        sinks: ``[N, Hq]`` float32 attention sink logits, or None.

    Raises:
        ValueError: As in `window_scores`, or N is 0.
    """
    require(len(queries) > 0, _NAME, "there must be at least one layer", len(queries))
    shapes = {(tuple(query.shape), query.dtype) for query in queries}
    require(len(shapes) == 1, _NAME, "the layers' queries must have one shape and dtype", shapes)
    stacked = torch.stack(list(queries)) if len(queries) > 1 else queries[0][None]
    scores = window_scores_of_rows(
        stacked,
        key_pages,
        pages,
        tokens,
        scale,
        variance=variance,
        maximum=maximum,
        pooled=pooled,
        last=last,
        grouped=grouped,
        sinks=sinks,
    )
    return [scores.row(index) for index in range(len(queries))]


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
) -> WindowScores:
    """Return the `window_scores` of N rows, stacked. A row is one layer of one request.

    Lengths stay on the device, so the call does not sync.

    Args:
        query: ``[N, w, Hq, D]`` any float dtype, rotated, in position order.
        key_pages: as in `window_scores`.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each row's pages in order. Pages past a
            row's length are not read.
        tokens: length of all rows, or an upper bound on `lengths`.
        scale: factor for all rows, or ``[N]`` float32 with one positive factor per row (unchecked).
        lengths: ``[N]`` int32: w <= length <= tokens (unchecked, because a check would sync). A row
            of length w has no past.
        variance: as in `window_scores`.
        maximum: as in `window_scores`.
        pooled: as in `window_scores`.
        last: as in `window_scores`.
        grouped: as in `window_scores`.
        sinks: ``[N, Hq]`` float32 attention sink logits, or None.
        row_log_sums: ``[N, Hq, w]`` float32, the natural logarithm of each query's softmax sum over
            its causal keys, ``log sum_j exp(scale * q k_j)``, as FlashAttention returns it; or
            None. With it, a GPU reads K once instead of twice. The GPU checks each query's
            attention sum, and scores a layer again without these values if a sum differs from 1 by
            more than 5e-5. Smaller errors stay in the scores. Unused with `sinks` or `pooled`.

    Returns:
        The results of `window_scores` with a leading axis N. A shorter row is 0 in `total` and
        `variance` from column ``lengths[r] - w`` on, and in `last` and `maximum` from column
        ``lengths[r]`` on.

    Raises:
        ValueError: As in `window_scores`, or N is 0.
    """
    w = _check_rows(query, key_pages, pages, tokens, scale, lengths, sinks)
    if row_log_sums is not None:
        expected = len(query), query.shape[2], w
        right = row_log_sums.shape == expected and row_log_sums.dtype == torch.float32
        got = tuple(row_log_sums.shape), row_log_sums.dtype
        require(right, _NAME, f"row_log_sums must be {list(expected)} float32", got)
    require(w > 1 or not variance, _NAME, "a variance needs a window of at least 2", w)
    require(maximum or not pooled, _NAME, "pooled needs maximum", (pooled, maximum))
    if contract.runs_triton(query):
        from kvcompress_kernels.window_scores.triton import run_rows
    else:
        from kvcompress_kernels.window_scores.cpu import run_rows
    outputs = Outputs(variance, maximum, pooled, last, grouped)
    arguments = query, key_pages, pages, tokens, scale, lengths, outputs, sinks
    return run_rows(*arguments, row_log_sums)


def _check_rows(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float | torch.Tensor,
    lengths: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> int:
    """Check the tensors, and return the number of tokens in the window.

    Raises:
        ValueError: Shapes or dtypes disagree, or the window is empty or as long as the prompt.
    """
    require(query.dim() == 4, _NAME, "query must be [N, w, Hq, D]", tuple(query.shape))
    rows, w, heads, dim = query.shape
    require(rows > 0, _NAME, "there must be at least one row", rows)
    require(key_pages.dim() == 4, _NAME, "key_pages must be [N, Hkv, D, bs]", key_pages.shape)
    check_floats(_NAME, "key_pages", key_pages)
    require(
        key_pages.shape[2] == dim, _NAME, f"key_pages must have head dim {dim}", key_pages.shape
    )
    kv_heads = key_pages.shape[1]
    require(heads % kv_heads == 0, _NAME, f"Hq must be a multiple of Hkv={kv_heads}", heads)
    require(0 < w < tokens, _NAME, "0 < window < tokens must hold", (w, tokens))
    check_pages(_NAME, pages, tokens, key_pages.shape[3], rows)
    if isinstance(scale, torch.Tensor):
        right = scale.shape == (rows,) and scale.dtype == torch.float32
        got = tuple(scale.shape), scale.dtype
        require(right, _NAME, f"scale must be a number or [{rows}] float32", got)
    if lengths is not None:
        right = lengths.shape == (rows,) and lengths.dtype == torch.int32
        got = tuple(lengths.shape), lengths.dtype
        require(right, _NAME, f"lengths must be [{rows}] int32", got)
    if sinks is not None:
        right = sinks.shape == (rows, heads) and sinks.dtype == torch.float32
        got = tuple(sinks.shape), sinks.dtype
        require(right, _NAME, f"sinks must be [{rows}, {heads}] float32", got)
    return w
