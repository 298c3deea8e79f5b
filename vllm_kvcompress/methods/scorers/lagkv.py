"""Rank by how much a token stands out from those that come soon after it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.lag_scores import lag_scores
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import BY_KEYS, Reads, Use
from vllm_kvcompress.methods.budget_spec import AttentionStats


@dataclass(frozen=True, slots=True, kw_only=True)
class LagKV:
    """LagKV (Liang et al. 2025, arXiv:2504.04704): each partition keeps its best, by the next one.

    The S tokens after the sinks, the window's too, fall into partitions. Keys and values are
    scaled by the extremes of the next partition, their standard deviations over the channels are
    softmaxed over the partition (`lag_scores`), and the tokens are ranked there: with rank r, 0 the
    lowest, ``score = r / lag``, so that all partitions keep the same share, up to one token. Ties
    go to the lower position.

    The last whole partition has no next one. It and what follows score their position, above
    every rank: they are kept, and where the budget cannot hold them, the latest of them.

    The authors' code has 16 sinks and partitions of 1024 by default; the sizes here are kvpress's.
    Both make all scores of a partition NaN where a channel is constant in the next one, which
    counts as 0 here. The authors' compresses again while it decodes, and its ratio is of each
    partition, where a budget here counts the sinks and the last partition too.

    Args:
        sinks: first tokens, kept before any other.
        lag: tokens of a partition.
    """

    reads: ClassVar[Reads] = Reads.KEYS | Reads.VALUES
    needs_whole_prompt: ClassVar[str] = BY_KEYS
    # The last partition scores its position, beside which no mean of ranks counts.
    unfit: ClassVar[Mapping[Use, str]] = dict.fromkeys(
        (Use.ACROSS_LAYERS, Use.AS_WEIGHTS), "ranks within partitions"
    )

    sinks: int = 4
    lag: int = 128

    def __post_init__(self) -> None:
        if not (isinstance(self.sinks, int) and self.sinks >= 0):
            raise ConfigError(
                f"lagkv.sinks must be a whole number >= 0, got {self.sinks}; 4 is usual"
            )
        if not (isinstance(self.lag, int) and self.lag >= 2):
            raise ConfigError(
                f"lagkv.lag must be a whole number >= 2, got {self.lag}: the tokens of a partition"
                " are ranked among themselves; 128 is usual"
            )

    def score(self, columns: AttentionStats) -> torch.Tensor:
        """``[Hkv, P]`` float32: +inf for sinks, ranks below 1, then the position."""
        keys, values, past = columns.keys, columns.values, columns.past
        if keys is None or values is None:
            raise ValueError("lagkv needs the cached keys and values; got none")
        caches = keys.key_pages, values.value_pages, keys.pages
        ranks = _ranks(lag_scores(*caches, keys.tokens, sinks=self.sinks, lag=self.lag)).flatten(1)
        position = torch.arange(past, dtype=torch.float32, device=columns.device)
        scores = position.repeat(columns.num_kv_heads, 1)
        judged = ranks[:, : max(past - self.sinks, 0)]
        scores[:, self.sinks : self.sinks + judged.shape[1]] = judged
        scores[:, : self.sinks] = torch.inf
        return scores


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """``[Hkv, parts, lag]`` float32: ``r / lag``, the lowest 0, of equal ones the first highest."""
    lag = scores.shape[2]
    order = scores.argsort(stable=True, dim=-1, descending=True)
    rank = torch.arange(lag - 1, -1, -1, dtype=torch.float32, device=scores.device) / lag
    return torch.empty_like(scores).scatter_(-1, order, rank.expand_as(scores))
