"""What an observation window thinks of the prompt before it."""

from collections.abc import Sequence

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_floats, check_pages, require
from kvcompress_kernels.window_scores.result import WindowScores

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
    sinks: torch.Tensor | None = None,
) -> WindowScores:
    """Attention of an observation window to the prompt before it, reduced over the window.

    ``A = softmax(scale * q k^T)`` over all `tokens` keys, causal inside the window, float32; the
    past columns are not renormalised after cutting (CAKE, arXiv:2503.12491, eq. 5 to 7;
    SnapKV, arXiv:2404.14469). Entropy is summed as ``A * (s - LSE)``, finite without an epsilon.
    Query head h reads KV head ``h // (Hq // Hkv)``.

    Rows are pooled as in DefensiveKV (Feng et al. 2025, arXiv:2510.13334): a row a over the past
    becomes ``p[j] = sum_{|n - j| <= 2} a[n] / 5``, zeros outside, and then ``p * sum(a) / sum(p)``,
    so that what falls off at both ends is not lost. A row that attends to nothing of the past
    stays 0.

    Args:
        query: ``[w, Hq, D]`` any float dtype, rotated, in position order.
        key_pages: ``[N, Hkv, D, block_size]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order. Slots of the
            last page from `tokens` on are not read into any result.
        tokens: prompt length S, the window included.
        scale: factor on the logits, usually ``D ** -0.5``, times the scale of a quantised K.
        variance: also return the variance; needs ``w >= 2``.
        maximum: also return the maximum over the rows.
        pooled: take it of the pooled rows; needs `maximum`.
        sinks: ``[Hq]`` float32, each query head's sink: a logit that stands in every row's softmax
            for no key, so that a row sums to less than 1 (gpt-oss; Xiao et al. 2024,
            arXiv:2309.17453, call it SoftMax-off-by-one where it is 0). None without.

    Raises:
        ValueError: shapes disagree, the window is empty or as long as the prompt, `variance`
            is asked of a single row, or `pooled` without `maximum`.
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
    sinks: torch.Tensor | None = None,
) -> list[WindowScores]:
    """`window_scores` of N layers of one prompt, which on a GPU share their launches.

    In the page pool a layer is only other page ids. Each gets what it gets alone: `total`,
    `variance`, `recent`, `last` and `maximum` bit for bit, sums over them up to the order of
    adding.

    Args:
        queries: N of ``[w, Hq, D]``.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each layer's pages of the prompt in order.
        scale: the same factor for all, or ``[N]`` float32, each layer's own, all positive.
        sinks: ``[N, Hq]`` float32, each layer's; None without.

    Raises:
        ValueError: as `window_scores`, or there is no layer.
    """
    require(len(queries) > 0, _NAME, "there must be a layer", len(queries))
    alike = {(tuple(query.shape), query.dtype) for query in queries}
    require(len(alike) == 1, _NAME, "the layers' queries must have one shape and dtype", alike)
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
    sinks: torch.Tensor | None = None,
) -> WindowScores:
    """`window_scores` of N rows at once, layers of one request or of several, stacked.

    Rows may differ in length, and the host need not know how long they are. What a row has no
    token for is 0 in `total`, `variance`, `last` and `maximum`: the first lie behind its past,
    ``lengths[r] - w`` columns, the others behind its last token.

    Args:
        query: ``[N, w, Hq, D]``.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each row's pages in order; those behind its
            length are not read.
        tokens: the length of every row, or where there are `lengths` one that none exceeds.
        scale: the same factor for all, or ``[N]`` float32, each row's own, positive (unchecked).
        sinks: ``[N, Hq]`` float32, each row's; None without.
        lengths: ``[N]`` int32: w <= length <= tokens (unchecked: checking would sync). A row may
            be its window alone, without a past.

    Returns:
        As `window_scores`, with a leading N.

    Raises:
        ValueError: as `window_scores`, or there is no row.
    """
    w = _check_rows(query, key_pages, pages, tokens, scale, lengths, sinks)
    require(w > 1 or not variance, _NAME, "a variance needs a window of at least 2", w)
    require(maximum or not pooled, _NAME, "pooled is of a maximum; ask for that too", maximum)
    if contract.triton_takes(query):
        from kvcompress_kernels.window_scores.triton import run_rows
    else:
        from kvcompress_kernels.window_scores.cpu import run_rows
    return run_rows(
        query, key_pages, pages, tokens, scale, lengths, variance, maximum, pooled, sinks
    )


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
        ValueError: shapes or dtypes disagree, or the window is empty or as long as the prompt.
    """
    require(query.dim() == 4, _NAME, "query must be [N, w, Hq, D]", tuple(query.shape))
    rows, w, heads, dim = query.shape
    require(rows > 0, _NAME, "there must be a row", rows)
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
