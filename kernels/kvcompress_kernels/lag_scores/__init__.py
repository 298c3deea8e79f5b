"""Scores of tokens relative to the next partition of tokens (LagKV)."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import (
    check_floats,
    check_keys,
    check_row_pages,
    check_same_pages,
    require,
)

_NAME = "lag_scores"


def lag_scores_of_rows(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    *,
    sinks: int,
    lag: int,
) -> torch.Tensor:
    """Return lag-relative scores per KV head of N rows (LagKV, arXiv:2504.04704).

    A row is one layer of one request. The tokens after the first `sinks` form partitions of `lag`
    tokens. For each partition that a full partition follows, with x its keys or its values:

        ``y[j, c] = (x[j, c] - low[c]) / (high[c] - low[c])``
        ``s[j] = softmax_j(std_c(y[j, c]))``

    where low and high are the minimum and maximum of channel c over the tokens of the NEXT
    partition, and the standard deviation has ddof 1. The score is the mean of the keys' s and the
    values' s. Channels with ``high - low < 1e-18`` have y = 0, and y is clamped at 1e18, so scores
    are finite for a cache below 1e18.

    A row's scores equal those of a call with that row alone, bit for bit. The number of launches
    does not depend on N.

    Args:
        key_pages: ``[pages, Hkv, D, block_size]`` any float dtype and strides.
        value_pages: ``[pages, Hkv, block_size, Dv]`` any float dtype and strides.
        pages: ``[N, ceil(tokens / block_size)]`` int64, each row's pages in order.
        tokens: tokens of every row.
        sinks: number of first tokens outside all partitions, >= 0.
        lag: tokens per partition, >= 1.

    Returns:
        ``[N, Hkv, parts, lag]`` float32 that sums to 1 in each partition, with
        ``parts = max((tokens - sinks) // lag - 1, 0)``: token ``sinks + p * lag + i`` is
        ``[:, :, p, i]``. Equal tokens of a partition have equal scores. Scales of a quantised cache
        cancel.

    Raises:
        ValueError: Shapes disagree, N or `tokens` is 0, or the pages have no float dtype.
    """
    check_keys(_NAME, key_pages)
    check_floats(_NAME, "value_pages", value_pages)
    check_same_pages(_NAME, key_pages, value_pages)
    check_row_pages(_NAME, pages, tokens, key_pages.shape[3])
    require(sinks >= 0 and lag >= 1, _NAME, "sinks >= 0 and lag >= 1 must hold", (sinks, lag))
    if contract.runs_triton(key_pages):
        from kvcompress_kernels.lag_scores.triton import run_rows
    else:
        from kvcompress_kernels.lag_scores.cpu import run_rows

    parts = max((tokens - sinks) // lag - 1, 0)
    if parts == 0:
        return key_pages.new_empty(len(pages), key_pages.shape[1], 0, lag, dtype=torch.float32)
    return run_rows(key_pages, value_pages, pages, parts, sinks, lag)
