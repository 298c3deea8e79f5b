"""Scores of tokens relative to the next partition of tokens (LagKV)."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_floats, check_pages, require


def lag_scores(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    *,
    sinks: int,
    lag: int,
) -> torch.Tensor:
    """Return lag-relative scores per KV head (LagKV, arXiv:2504.04704).

    The tokens after the first `sinks` form partitions of `lag` tokens. For each partition that a
    full partition follows, with x its keys or its values:

        ``y[j, c] = (x[j, c] - low[c]) / (high[c] - low[c])``
        ``s[j] = softmax_j(std_c(y[j, c]))``

    where low and high are the minimum and maximum of channel c over the tokens of the NEXT
    partition, and the standard deviation has ddof 1. The score is the mean of the keys' s and the
    values' s. Channels with ``high - low < 1e-18`` have y = 0, and y is clamped at 1e18, so scores
    are finite for a cache below 1e18.

    Args:
        key_pages: ``[N, Hkv, D, block_size]`` any float dtype and strides.
        value_pages: ``[N, Hkv, block_size, Dv]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order.
        tokens: prompt tokens.
        sinks: number of first tokens outside all partitions, >= 0.
        lag: tokens per partition, >= 1.

    Returns:
        ``[Hkv, parts, lag]`` float32 that sums to 1 in each partition, with
        ``parts = max((tokens - sinks) // lag - 1, 0)``: token ``sinks + p * lag + i`` is
        ``[:, p, i]``. Equal tokens of a partition have equal scores. Scales of a quantised cache
        cancel.

    Raises:
        ValueError: Shapes disagree, `tokens` is 0, or the pages have no float dtype.
    """
    name = "lag_scores"
    require(key_pages.dim() == 4, name, "key_pages must be [N, Hkv, D, bs]", tuple(key_pages.shape))
    check_floats(name, "key_pages", key_pages)
    check_floats(name, "value_pages", value_pages)
    count, kv_heads, _, block = key_pages.shape
    ok = value_pages.dim() == 4 and value_pages.shape[:3] == (count, kv_heads, block)
    rule = f"value_pages must be [{count}, {kv_heads}, {block}, D]"
    require(ok, name, rule, tuple(value_pages.shape))
    require(tokens > 0, name, "tokens must be positive", tokens)
    require(sinks >= 0 and lag >= 1, name, "sinks >= 0 and lag >= 1 must hold", (sinks, lag))
    check_pages(name, pages, tokens, block)
    if contract.runs_triton(key_pages):
        from kvcompress_kernels.lag_scores.triton import run
    else:
        from kvcompress_kernels.lag_scores.cpu import run

    parts = max((tokens - sinks) // lag - 1, 0)
    if parts == 0:
        return key_pages.new_empty(kv_heads, 0, lag, dtype=torch.float32)
    return run(key_pages, value_pages, pages, parts, sinks, lag)
