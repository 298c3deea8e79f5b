"""How much each token stands out from the partition of tokens that follows its own."""

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
    """Lag-relative scores (LagKV, arXiv:2504.04704), per KV head.

    The tokens after the first `sinks` fall into partitions of `lag`. In each one that a whole
    partition follows, with x its keys or its values:

        ``y[j, c] = (x[j, c] - low[c]) / (high[c] - low[c])``
        ``s[j] = softmax_j(std_c(y[j, c]))``

    where low and high are the minimum and maximum of channel c over the tokens of the NEXT
    partition, and the standard deviation has ddof 1. The score is the mean of the keys' s and the
    values' s. Where ``high - low < 1e-18`` the channel says nothing and y is 0; beyond 1e18, y
    is that. So scores of a cache below 1e18 are finite.

    Args:
        key_pages: ``[N, Hkv, D, block_size]`` any float dtype and strides.
        value_pages: ``[N, Hkv, block_size, Dv]``, likewise.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order.
        tokens: prompt tokens.
        sinks: first tokens that are in no partition, >= 0.
        lag: tokens of a partition, >= 1.

    Returns:
        ``[Hkv, parts, lag]`` float32, each partition of sum 1, with
        ``parts = max((tokens - sinks) // lag - 1, 0)``: token ``sinks + p * lag + i`` is
        ``[:, p, i]``. Equal tokens of a partition have equal scores. Scales of a quantised cache
        cancel.

    Raises:
        ValueError: shapes disagree, there are no tokens, or the pages are no floats.
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
    if contract.triton_takes(key_pages):
        from kvcompress_kernels.lag_scores.triton import run
    else:
        from kvcompress_kernels.lag_scores.cpu import run

    parts = max((tokens - sinks) // lag - 1, 0)
    if parts == 0:
        return key_pages.new_empty(kv_heads, 0, lag, dtype=torch.float32)
    return run(key_pages, value_pages, pages, parts, sinks, lag)
