"""Score by how much the window attends to a token and by how much that attention varies."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.scorers import pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class CakeIndicator:
    """CAKE's eviction indicator (Qin et al. 2025, arXiv:2503.12491, eq. 9): mean + gamma * Var.

    ``score[g] = mean_{h in g} avgpool(m[h] + gamma * r[h])`` with the sample variance (ddof 1), in
    float32. The authors' code works in the model's dtype, where small variances become zero.

    Args:
        gamma: weight of the variance, >= 0 (200 in the paper).
        kernel: average pooling width in tokens, odd.
    """

    reads: ClassVar[Reads] = Reads.WINDOW | Reads.VARIANCE | Reads.KV_HEADS
    needs_whole_prompt: ClassVar[str] = ""

    gamma: float = 200.0
    kernel: int = 5

    def __post_init__(self) -> None:
        if not (self.gamma >= 0 and math.isfinite(self.gamma)):
            raise ConfigError(f"cake.gamma must be a finite number >= 0, got {self.gamma}")
        pooling.check("cake", "avg", self.kernel)

    def score(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32 scores."""
        if stats.total is None or stats.variance is None:
            raise ValueError("cake needs the window's attention and its variance; got none")
        indicator = stats.total / stats.num_queries + self.gamma * stats.variance
        if len(indicator) > stats.num_kv_heads:
            indicator = pooling.group_mean(indicator, stats.num_kv_heads)
        return pooling.pool(indicator, "avg", self.kernel)
