"""LagKV (Liang et al. 2025, arXiv:2504.04704): tokens that differ from those that come soon after.

docs/methods.md 4.9.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.lag_scores import lag_scores_of_rows
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import COMPARES_ALL_KEYS, Reads, ScoreUse
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.preset import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class LagKV:
    """LagKV (Liang et al. 2025, arXiv:2504.04704): each partition is ranked against the next one.

    The S tokens after the sinks, including the window's, are cut into partitions. Keys and values
    are scaled by the extremes of the next partition, their standard deviations over the channels
    are softmaxed over the partition (`lag_scores`), and the tokens are ranked within it: with rank
    r, 0 the lowest, ``score = r / lag``, so that all partitions keep the same share, up to one
    token. Ties go to the lower position.

    The last complete partition has no next one. Its tokens and those after it score their position,
    which is above every rank: they are kept, or the latest of them if the budget cannot hold all.

    The authors' code defaults to 16 sinks and partitions of 1024; the sizes here are kvpress's.
    Both codes make all scores of a partition NaN if a channel is constant in the next one; here
    that channel counts as 0. The authors' code also compresses during decode and applies its ratio
    to each partition, while a budget here counts the sinks and the last partition too.

    Args:
        sinks: first tokens, kept before any other.
        lag: tokens of a partition.
    """

    reads: ClassVar[Reads] = Reads.KEYS | Reads.VALUES
    needs_whole_prompt: ClassVar[str] = COMPARES_ALL_KEYS
    # The last partition's scores are positions, which outweigh any mean of ranks.
    unfit: ClassVar[Mapping[ScoreUse, str]] = dict.fromkeys(
        (ScoreUse.ACROSS_LAYERS, ScoreUse.AS_WEIGHTS), "ranks within partitions"
    )

    sinks: int = 4
    lag: int = 128

    def __post_init__(self) -> None:
        if not (isinstance(self.sinks, int) and self.sinks >= 0):
            raise ConfigError(
                f"lagkv.sinks must be a whole number >= 0, got {self.sinks}; the default is 4"
            )
        if not (isinstance(self.lag, int) and self.lag >= 2):
            raise ConfigError(
                f"lagkv.lag must be a whole number >= 2, got {self.lag}, because tokens are ranked"
                " within a partition; the default is 128"
            )

    def score(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32: +inf for sinks, ranks below 1, then the position."""
        keys, values, past = stats.keys, stats.values, stats.past
        if keys is None or values is None:
            raise ValueError("lagkv needs the cached keys and values; got none")
        caches = keys.key_pages, values.value_pages, keys.pages_by_layer
        of_layers = lag_scores_of_rows(*caches, keys.tokens, sinks=self.sinks, lag=self.lag)
        ranks = _ranks(of_layers.flatten(0, 1)).flatten(1)
        position = torch.arange(past, dtype=torch.float32, device=stats.device)
        scores = position.repeat(stats.num_kv_heads, 1)
        partition_ranks = ranks[:, : max(past - self.sinks, 0)]
        scores[:, self.sinks : self.sinks + partition_ranks.shape[1]] = partition_ranks
        scores[:, : self.sinks] = torch.inf
        return scores


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """Return ``[Hkv, parts, lag]`` float32 ``r / lag``, 0 for the lowest score.

    Of equal scores, the first gets the highest rank.
    """
    lag = scores.shape[2]
    order = scores.argsort(stable=True, dim=-1, descending=True)
    rank = torch.arange(lag - 1, -1, -1, dtype=torch.float32, device=scores.device) / lag
    return torch.empty_like(scores).scatter_(-1, order, rank.expand_as(scores))


PRESET = Preset(allocator="uniform", scorer="lagkv", window=32)
