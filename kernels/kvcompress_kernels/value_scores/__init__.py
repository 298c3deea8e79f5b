"""Change of the attention output when a token is evicted (CAOTE)."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_floats, check_pages, require


def value_scores(
    weights: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    *,
    fast: bool,
    reduce: str,
) -> torch.Tensor:
    """Return how much evicting each token changes the attention output (CAOTE, arXiv:2504.14051).

    ``c_j = h_j / (1 - h_j) * ||o - v_j||_2`` for the weights h of each query head, with
    ``o = sum_j h_j v_j``. This is exact if h is an attention row. c is then reduced over the query
    heads of a KV head.

    ``1 - h_j`` is clamped at 1e-6 for weights up to 1/2. A heavier token uses the equal form
    ``h_j * ||o_without_j - v_j||``, which is accurate up to a weight of 1. With `fast` it uses the
    sum of the other weights for ``1 - h_j`` instead.

    Args:
        weights: ``[Hq, tokens]`` float32, >= 0; each row sums to 1 (unchecked).
        value_pages: ``[N, Hkv, block_size, D]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order.
        tokens: prompt tokens.
        fast: FastCAOTE: o is the unweighted mean of all values.
        reduce: "mean", or "l2" for the root of the sum of squares, which is the change of the
            concatenated outputs of the group.

    Returns:
        ``[Hkv, tokens]`` float32. Evict the smallest first. For a quantised V, multiply by its
        scale to compare layers.

    Raises:
        ValueError: Shapes disagree, `weights` is not float32, or `reduce` is unknown.
    """
    name = "value_scores"
    require(value_pages.dim() == 4, name, "value_pages must be [N, Hkv, bs, D]", value_pages.shape)
    require(tokens > 0, name, "tokens must be positive", tokens)
    right = weights.dim() == 2 and weights.shape[1] == tokens
    require(right, name, f"weights must be [Hq, {tokens}]", tuple(weights.shape))
    check_pages(name, pages, tokens, value_pages.shape[2])
    return value_scores_of_rows(
        weights[None], value_pages, pages[None], tokens, fast=fast, reduce=reduce
    )[0]


def value_scores_of_rows(
    weights: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    *,
    lengths: torch.Tensor | None = None,
    fast: bool,
    reduce: str,
) -> torch.Tensor:
    """Return the `value_scores` of N rows. A row is one layer of one request.

    The host need not know the length of each row. A row's scores equal those of a call with that
    row alone, bit for bit. The number of launches does not depend on N.

    Args:
        weights: ``[N, Hq, tokens]`` float32. Columns past a row's length are not read.
        value_pages: as in `value_scores`.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each row's pages in order. Pages past a
            row's length are not read.
        tokens: length of all rows, or an upper bound on `lengths`.
        lengths: ``[N]`` int32: 0 < length <= tokens (unchecked, because a check would sync). None
            if all rows have `tokens`.
        fast: as in `value_scores`.
        reduce: as in `value_scores`.

    Returns:
        ``[N, Hkv, tokens]`` float32, 0 past a row's length.

    Raises:
        ValueError: As in `value_scores`, or N is 0.
    """
    name = "value_scores"
    require(reduce in ("mean", "l2"), name, "reduce must be 'mean' or 'l2'", repr(reduce))
    require(value_pages.dim() == 4, name, "value_pages must be [N, Hkv, bs, D]", value_pages.shape)
    check_floats(name, "value_pages", value_pages)
    kv_heads, block = value_pages.shape[1:3]
    require(tokens > 0, name, "tokens must be positive", tokens)
    require(weights.dim() == 3, name, "weights must be [N, Hq, tokens]", tuple(weights.shape))
    rows, heads, columns = weights.shape
    require(rows > 0, name, "there must be at least one row", rows)
    require(columns == tokens, name, f"weights must be [N, Hq, {tokens}]", tuple(weights.shape))
    require(weights.dtype == torch.float32, name, "weights must be float32", weights.dtype)
    require(
        heads > 0 and heads % kv_heads == 0, name, f"Hq must be a multiple of Hkv={kv_heads}", heads
    )
    check_pages(name, pages, tokens, block, rows)
    if lengths is not None:
        right = lengths.shape == (rows,) and lengths.dtype == torch.int32
        got = tuple(lengths.shape), lengths.dtype
        require(right, name, f"lengths must be [{rows}] int32", got)
    if contract.runs_triton(weights):
        from kvcompress_kernels.value_scores.triton import run_rows
    else:
        from kvcompress_kernels.value_scores.cpu import run_rows

    return run_rows(weights, value_pages, pages, tokens, lengths, fast, reduce)
