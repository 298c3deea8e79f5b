"""H2O (Zhang et al. 2023, arXiv:2306.14048): the attention that all queries paid to a token.

docs/methods.md 3 and 4.2.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.methods.base import COUNTS_QUERIES, Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.parts import pooling
from vllm_kvcompress.methods.preset import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class H2O:
    """H2O (Zhang et al. 2023, arXiv:2306.14048): causal attention summed over all queries.

    ``score[g, j] = mean_{h in g} sum_{i >= j} A[h, i, j]``. The window takes the place of the
    paper's recent tokens, of which the authors keep as many as heavy hitters. A widely used copy of
    the code attended to the future in every query before the window; this one is causal.

    Args:
        per_query: score by the mean over the queries that see j instead (`pooling.column_means`).
            The sum favours early tokens, which more queries have seen.
    """

    reads: ClassVar[Reads] = Reads.COLUMN_SUMS

    per_query: bool = False

    @property
    def needs_whole_prompt(self) -> str:
        return COUNTS_QUERIES if self.per_query else ""

    def score(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32 scores."""
        if stats.sums is None:
            raise ValueError("h2o needs the column sums of the whole attention; got none")
        attention = pooling.column_means(stats.sums) if self.per_query else stats.sums
        return pooling.group_mean(attention[:, : stats.past], stats.num_kv_heads)


PRESET = Preset(allocator="uniform", scorer="h2o", window=32)
