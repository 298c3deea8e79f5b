"""How the rows of the window become one figure per key: their mean, or their maximum.

A mean forgets the key that one row needs; a maximum keeps it.

* ``mean``: SnapKV's, and so CAOTE's. The mean over query heads and rows, then pooled.
* ``max``: the maximum over query heads and rows, then pooled.
* ``defensive``: DefensiveKV's worst case (Feng et al. 2025, arXiv:2510.13334) without its value
  norms and head budgets. Rows are pooled by themselves (`window_scores`), then the maximum is
  taken, and then every score is raised to at least the mean of its row. Nothing is pooled after.
"""

from collections.abc import Mapping

import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.scorers import pooling

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
    """Parameters of pooling that an aggregate does not take, each with the reason."""
    if aggregate != "defensive":
        return {}
    return dict.fromkeys(
        ("pooling", "kernel"),
        "has no effect with aggregate 'defensive', which pools by itself; remove it, or set"
        " aggregate to max",
    )


def needs_whole_prompt(aggregate: str) -> str:
    """Why an aggregate needs all tokens of a prompt; empty where it does not."""
    if aggregate != "defensive":
        return ""
    return "it compares scores with their mean over the whole prompt"


def past_scores(
    columns: AttentionStats, aggregate: str, lines: int, kind: str, kernel: int
) -> torch.Tensor:
    """``[lines, P]`` float32: the window's attention to the past, aggregated and pooled.

    Args:
        columns: with what the `aggregate` reads.
        lines: KV heads, or query heads, which then stay apart.
        kind, kernel: of the pooling that follows.
    """
    if aggregate == "mean":
        if columns.total is None:
            raise ValueError("an aggregate of mean needs the window's attention; got none")
        total = columns.total
        grouped = total if lines == len(total) else pooling.group_mean(total, lines)
        return pooling.pool(grouped, kind, kernel)
    if columns.maximum is None:
        raise ValueError(f"an aggregate of {aggregate} needs the window's maximum; got none")
    grouped = columns.maximum[:, : columns.past].reshape(lines, -1, columns.past).amax(1)
    if aggregate == "max":
        return pooling.pool(grouped, kind, kernel)
    return torch.maximum(grouped, grouped.mean(-1, keepdim=True, dtype=torch.float64).float())
