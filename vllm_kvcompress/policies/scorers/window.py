"""Rank by the attention of the last queries."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_kvcompress.plan import Columns
from vllm_kvcompress.policies.base import Reads
from vllm_kvcompress.policies.scorers import aggregates, pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV:
    """SnapKV (Li et al. 2024, arXiv:2404.14469): attention summed over the window, then pooled.

    ``score[g] = pool(mean_{h in g} sum_i A[h, i])``: the mean over the KV head's query heads comes
    before the pooling. The authors' code stores and selects per query head instead, at G times
    the memory.

    Args:
        pooling: "max" (the authors' benchmark settings) or "avg".
        kernel: pooling width in tokens, odd.
        aggregate: over the window's rows and the KV head's query heads: "mean", or "max" or
            "defensive", which are not SnapKV's (`aggregates`). The last is not pooled again.
    """

    pooling: str = "max"
    kernel: int = 7
    aggregate: str = "mean"

    def __post_init__(self) -> None:
        pooling.check("snapkv", self.pooling, self.kernel)
        aggregates.check("snapkv", self.aggregate)

    @property
    def reads(self) -> Reads:
        return aggregates.AGGREGATES[self.aggregate]

    @property
    def unused(self) -> Mapping[str, str]:
        return aggregates.unused(self.aggregate)

    def score(self, columns: Columns) -> torch.Tensor:
        """``[Hkv, P]`` float32."""
        lines, kind, kernel = columns.num_kv_heads, self.pooling, self.kernel
        return aggregates.past_scores(columns, self.aggregate, lines, kind, kernel)
