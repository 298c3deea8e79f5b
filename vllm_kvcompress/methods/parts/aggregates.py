"""Aggregation of the window's attention to one number per key: a mean or a maximum over queries.

A mean hides a key that only one query needs; a maximum keeps it.

* ``mean``: as in SnapKV, and so in CAOTE. The mean over query heads and queries, then pooled.
* ``max``: the maximum over query heads and queries, then pooled.
* ``defensive``: DefensiveKV's worst case (Feng et al. 2025, arXiv:2510.13334) without its value
  norms and head budgets. Each query's attention is pooled (`window_scores`), the maximum is taken,
  and every score is raised to at least its KV head's mean. Nothing is pooled afterwards.
"""

from collections.abc import Mapping

import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.parts import pooling

AGGREGATES: Mapping[str, Reads] = {
    "mean": Reads.WINDOW,
    "max": Reads.WINDOW | Reads.MAXIMUM,
    "defensive": Reads.WINDOW | Reads.MAXIMUM | Reads.POOLED,
}


def check(owner: str, aggregate: str) -> None:
    """Raise ConfigError unless `aggregate` is known."""
    if aggregate not in AGGREGATES:
        raise ConfigError(f"{owner}.aggregate must be one of {list(AGGREGATES)}, got {aggregate!r}")


def unused(aggregate: str) -> Mapping[str, str]:
    """Return the pooling parameters that an aggregate ignores, with the reason for each."""
    if aggregate != "defensive":
        return {}
    return dict.fromkeys(
        ("pooling", "kernel"),
        "has no effect with aggregate 'defensive', which has its own pooling; remove it, or set"
        " aggregate to max",
    )


def needs_whole_prompt(aggregate: str) -> str:
    """Return why an aggregate needs all tokens of a prompt; empty if it does not."""
    if aggregate != "defensive":
        return ""
    return "it compares scores with their mean over the whole prompt"


def past_scores(
    stats: AttentionStats, aggregate: str, num_heads: int, kind: str, kernel: int
) -> torch.Tensor:
    """Return the window's attention to the past, aggregated and pooled.

    Args:
        stats: with the statistics that `aggregate` reads.
        num_heads: heads of the result: KV heads, or query heads to keep them separate.
        kind, kernel: of the pooling after aggregation.

    Returns:
        ``[num_heads, P]`` float32.
    """
    if aggregate == "mean":
        if stats.total is None:
            raise ValueError("aggregate mean needs the window's attention; got none")
        total = stats.total
        grouped = total if num_heads == len(total) else pooling.group_mean(total, num_heads)
        return pooling.pool(grouped, kind, kernel)
    if stats.maximum is None:
        raise ValueError(f"aggregate {aggregate} needs the window's maximum; got none")
    grouped = stats.maximum[:, : stats.past].reshape(num_heads, -1, stats.past).amax(1)
    if aggregate == "max":
        return pooling.pool(grouped, kind, kernel)
    return torch.maximum(grouped, grouped.mean(-1, keepdim=True, dtype=torch.float64).float())
