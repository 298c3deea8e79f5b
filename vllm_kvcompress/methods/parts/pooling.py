"""Means of attention over heads or queries, and pooling with stride 1 and odd kernels."""

import torch
from torch.nn.functional import avg_pool1d, max_pool1d

from vllm_kvcompress.errors import ConfigError

POOLINGS = ("avg", "max")

MAX_KERNEL = 1023
"""Largest pooling width. SnapKV pools over 7 scores, and no window has more than 1024 tokens."""


def check(owner: str, kind: str, kernel: int) -> None:
    """Raise ConfigError unless `kind` is known and `kernel` is odd."""
    if kind not in POOLINGS:
        raise ConfigError(f"{owner}.pooling must be one of {list(POOLINGS)}, got {kind!r}")
    if not (isinstance(kernel, int) and kernel >= 1 and kernel % 2 == 1):
        raise ConfigError(
            f"{owner}.kernel must be an odd whole number >= 1, got {kernel}: an even kernel shifts"
            " the scores; 1 turns pooling off"
        )
    if kernel > MAX_KERNEL:
        raise ConfigError(
            f"{owner}.kernel must be at most {MAX_KERNEL}, got {kernel}: a larger kernel"
            " gives adjacent tokens the same score; 5 and 7 are common"
        )


def pool(scores: torch.Tensor, kind: str, kernel: int) -> torch.Tensor:
    """Return ``[H, P]`` float32 scores pooled along P.

    avg pads with zeros and divides by the kernel size at the edges too; max pads with -inf.
    """
    if kernel == 1 or scores.shape[-1] == 0:
        return scores
    pool1d = avg_pool1d if kind == "avg" else max_pool1d
    return pool1d(scores.unsqueeze(0), kernel, stride=1, padding=kernel // 2).squeeze(0)


def group_mean(values: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return ``[Hkv, P]``, the mean of ``[Hq, P]`` over the query heads that share a KV head.

    The mean is computed in float64, so that equal columns stay equal whatever the order of
    summation.
    """
    heads, length = values.shape
    grouped = values.reshape(num_kv_heads, heads // num_kv_heads, length)
    return grouped.mean(1, dtype=torch.float64).float()


def column_means(sums: torch.Tensor) -> torch.Tensor:
    """Return ``[Hq, S]`` float32, column sums divided by the number of queries that see the column.

    Column j is seen by ``S - j`` queries.
    """
    return sums / torch.arange(sums.shape[-1], 0, -1, device=sums.device)
