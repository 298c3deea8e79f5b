"""How much each token matters to the attention output."""

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
    """How much the attention output would change if one token went (CAOTE, arXiv:2504.14051).

    ``c_j = h_j / (1 - h_j) * ||o - v_j||_2`` for each query head's weights h, with
    ``o = sum_j h_j v_j``; exact if h is an attention row. ``1 - h_j`` is clamped at 1e-6, but for
    a token of more than half of a row's weight, whose c is ``h_j * ||o_without_j - v_j||``, the
    same and precise up to a weight of 1; `fast` has no such form, and takes for its ``1 - h_j``
    what the other tokens have. c is then reduced over the query heads of a KV head.

    Args:
        weights: ``[Hq, tokens]`` float32, >= 0, rows that sum to 1; values unchecked.
        value_pages: ``[N, Hkv, block_size, D]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order.
        tokens: prompt tokens.
        fast: FastCAOTE: o is the plain mean of the values of all tokens.
        reduce: "mean", or "l2", the root of the sum of squares: the change of the group's
            concatenated outputs.

    Returns:
        ``[Hkv, tokens]`` float32; the smallest is to be evicted first. Of a quantised V these are
        to be multiplied by its scale, which matters where layers are compared.

    Raises:
        ValueError: shapes disagree, `weights` is not float32, or `reduce` is unknown.
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
    """`value_scores` of N rows at once, layers of one request or of several.

    Rows may differ in length, and the host need not know how long they are. Each gets what it gets
    alone; behind its last token it scores 0.

    Args:
        weights: ``[N, Hq, tokens]``; what lies behind a row's length is not read.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each row's pages in order; likewise.
        tokens: the length of every row, or where there are `lengths` one that none exceeds.
        lengths: ``[N]`` int32: 0 < length <= tokens (unchecked: checking would sync).

    Returns:
        ``[N, Hkv, tokens]`` float32.

    Raises:
        ValueError: as `value_scores`, or there is no row.
    """
    name = "value_scores"
    require(reduce in ("mean", "l2"), name, "reduce must be 'mean' or 'l2'", repr(reduce))
    require(value_pages.dim() == 4, name, "value_pages must be [N, Hkv, bs, D]", value_pages.shape)
    check_floats(name, "value_pages", value_pages)
    kv_heads, block = value_pages.shape[1:3]
    require(tokens > 0, name, "tokens must be positive", tokens)
    require(weights.dim() == 3, name, "weights must be [N, Hq, tokens]", tuple(weights.shape))
    rows, heads, columns = weights.shape
    require(rows > 0, name, "there must be a row", rows)
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
    if contract.triton_takes(weights):
        from kvcompress_kernels.value_scores.triton import run_rows
    else:
        from kvcompress_kernels.value_scores.cpu import run_rows

    return run_rows(weights, value_pages, pages, tokens, lengths, fast, reduce)
