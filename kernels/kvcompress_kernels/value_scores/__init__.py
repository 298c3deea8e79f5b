"""Change of the attention output when a token is evicted (CAOTE)."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_pages, check_tensor, check_values, require

_NAME = "value_scores"


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
    """Return how much evicting each token changes the attention output (CAOTE, arXiv:2504.14051).

    A row is one layer of one request. ``c_j = h_j / (1 - h_j) * ||o - v_j||_2`` for the weights h
    of each query head, with ``o = sum_j h_j v_j``. This is exact if h is an attention row. c is
    then reduced over the query heads of a KV head.

    ``1 - h_j`` is clamped at 1e-6 for weights up to 1/2. A heavier token uses the equal form
    ``h_j * ||o_without_j - v_j||``, which is accurate up to a weight of 1. With `fast` it uses the
    sum of the other weights for ``1 - h_j`` instead.

    The host need not know the length of each row. A row's scores equal those of a call with that
    row alone, bit for bit. The number of launches does not depend on N.

    Args:
        weights: ``[N, Hq, tokens]`` float32, >= 0; each query head's weights sum to 1 (unchecked).
            Columns past a row's length are not read.
        value_pages: ``[pages, Hkv, block_size, D]`` any float dtype and strides.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each row's pages in order. Pages past a
            row's length are not read.
        tokens: length of all rows, or an upper bound on `lengths`.
        lengths: ``[N]`` int32: 0 < length <= tokens (unchecked, because a check would sync). None
            if all rows have `tokens`.
        fast: FastCAOTE: o is the unweighted mean of all values.
        reduce: "mean", or "l2" for the root of the sum of squares, which is the change of the
            concatenated outputs of the group.

    Returns:
        ``[N, Hkv, tokens]`` float32, 0 past a row's length. Evict the smallest first. For a
        quantised V, multiply by its scale to compare layers.

    Raises:
        ValueError: Shapes disagree, N is 0, `weights` is not float32, or `reduce` is unknown.
    """
    require(reduce in ("mean", "l2"), _NAME, "reduce must be 'mean' or 'l2'", repr(reduce))
    check_values(_NAME, value_pages)
    kv_heads, block = value_pages.shape[1:3]
    require(tokens > 0, _NAME, "tokens must be positive", tokens)
    require(weights.dim() == 3, _NAME, "weights must be [N, Hq, tokens]", tuple(weights.shape))
    rows, heads, columns = weights.shape
    require(rows > 0, _NAME, "there must be at least one row", rows)
    require(columns == tokens, _NAME, f"weights must be [N, Hq, {tokens}]", tuple(weights.shape))
    require(weights.dtype == torch.float32, _NAME, "weights must be float32", weights.dtype)
    rule = f"Hq must be a multiple of Hkv={kv_heads}"
    require(heads > 0 and heads % kv_heads == 0, _NAME, rule, heads)
    check_pages(_NAME, pages, tokens, block, rows)
    if lengths is not None:
        check_tensor(_NAME, "lengths", lengths, (rows,), torch.int32)
    if contract.runs_triton(weights):
        from kvcompress_kernels.value_scores.triton import run_rows
    else:
        from kvcompress_kernels.value_scores.cpu import run_rows

    return run_rows(weights, value_pages, pages, tokens, lengths, fast, reduce)
