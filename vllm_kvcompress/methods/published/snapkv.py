"""SnapKV (Li et al. 2024, arXiv:2404.14469): the last queries' attention.

docs/methods.md 4.4.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvcompress_kernels.value_norms import value_norms_of_rows
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.parts import aggregates, pooling
from vllm_kvcompress.methods.preset import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV:
    """SnapKV (Li et al. 2024, arXiv:2404.14469): attention summed over the window, then pooled.

    ``score[g] = pool(mean_{h in g} sum_i A[h, i])``: the mean over the KV head's query heads is
    taken before pooling. The authors' code stores and selects per query head instead, which takes G
    times the memory.

    Args:
        pooling: "max" (the authors' benchmark settings) or "avg".
        kernel: pooling width in tokens, odd.
        aggregate: over the window's queries and the KV head's query heads: "mean", or "max" or
            "defensive", which are not SnapKV's (`aggregates`). "defensive" is not pooled again.
        value_norm: multiply the scores by ``|v_j|_1`` divided by its sum over the KV head's past.
            This is DefensiveKV's (Feng et al. 2025, arXiv:2510.13334), not SnapKV's.
    """

    pooling: str = "max"
    kernel: int = 7
    aggregate: str = "mean"
    value_norm: bool = False

    def __post_init__(self) -> None:
        pooling.check("snapkv", self.pooling, self.kernel)
        aggregates.check("snapkv", self.aggregate)

    @property
    def reads(self) -> Reads:
        values = Reads.VALUES if self.value_norm else Reads.NOTHING
        return aggregates.AGGREGATES[self.aggregate] | Reads.KV_HEADS | values

    @property
    def needs_whole_prompt(self) -> str:
        reason = "it compares the values' norms with their sum over the whole prompt"
        return aggregates.needs_whole_prompt(self.aggregate) or (reason if self.value_norm else "")

    @property
    def unused(self) -> Mapping[str, str]:
        return aggregates.unused(self.aggregate)

    def score(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32 scores."""
        num_heads, kind, kernel = stats.num_kv_heads, self.pooling, self.kernel
        scores = aggregates.past_scores(stats, self.aggregate, num_heads, kind, kernel)
        return scores * self._value_shares(stats) if self.value_norm else scores

    @staticmethod
    def _value_shares(stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32 of sum 1 per KV head; 0 if all of a head's values are 0."""
        values = stats.values
        if values is None:
            raise ValueError("snapkv with value_norm needs the cached values; got none")
        norms = value_norms_of_rows(values.value_pages, values.pages_by_layer, values.tokens)
        norms = norms.flatten(0, 1)[:, : stats.past]
        total = norms.sum(-1, keepdim=True, dtype=torch.float64).float()
        return norms / total.clamp_min(torch.finfo(total.dtype).tiny)


PRESET = Preset(allocator="uniform", scorer="snapkv", window=32)
