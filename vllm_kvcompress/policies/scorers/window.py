"""Rank by the attention of the last queries."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.plan import Columns
from vllm_kvcompress.policies.base import Reads
from vllm_kvcompress.policies.scorers import pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV:
    """SnapKV (Li et al. 2024, arXiv:2404.14469): attention summed over the window, then pooled.

    ``score[g] = pool(mean_{h in g} sum_i A[h, i])``: the mean over the KV head's query heads comes
    before the pooling. The authors' code stores and selects per query head instead, at G times
    the memory.

    Args:
        pooling: "max" (the authors' benchmark settings) or "avg".
        kernel: pooling width in tokens, odd.
    """

    reads: ClassVar[Reads] = Reads.WINDOW

    pooling: str = "max"
    kernel: int = 7

    def __post_init__(self) -> None:
        pooling.check("snapkv", self.pooling, self.kernel)

    def score(self, columns: Columns) -> torch.Tensor:
        """``[Hkv, P]`` float32."""
        if columns.total is None:
            raise ValueError("snapkv needs the window's attention; got none")
        grouped = pooling.group_mean(columns.total, columns.num_kv_heads)
        return pooling.pool(grouped, self.pooling, self.kernel)
