"""Rank by the attention that the whole prompt paid to a token."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.methods.base import BY_QUERIES, Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.scorers import pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class H2O:
    """H2O (Zhang et al. 2023, arXiv:2306.14048): causal attention summed over all rows.

    ``score[g, j] = mean_{h in g} sum_{i >= j} A[h, i, j]``. The window plays the part of the
    paper's recent tokens; the authors keep half and half. A widely used copy attended to the
    future in every row before the window; this is causal.

    Args:
        per_query: score by the mean over the rows that see j instead (`column_means`). The sum
            favours early tokens, which more rows have seen.
    """

    reads: ClassVar[Reads] = Reads.COLUMN_SUMS

    per_query: bool = False

    @property
    def needs_whole_prompt(self) -> str:
        return BY_QUERIES if self.per_query else ""

    def score(self, columns: AttentionStats) -> torch.Tensor:
        """``[Hkv, P]`` float32."""
        if columns.sums is None:
            raise ValueError("h2o needs the column sums of the whole attention; got none")
        seen = column_means(columns.sums) if self.per_query else columns.sums
        return pooling.group_mean(seen[:, : columns.past], columns.num_kv_heads)


def column_means(sums: torch.Tensor) -> torch.Tensor:
    """``[Hq, S]`` float32: column sums over the number of rows that see the column, ``S - j``."""
    return sums / torch.arange(sums.shape[-1], 0, -1, device=sums.device)
