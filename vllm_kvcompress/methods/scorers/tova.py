"""Rank by the attention of the last query alone."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Tova:
    """TOVA (Oren et al. 2024, arXiv:2401.06104): the last row, averaged over all query heads.

    ``score[j] = mean_h A[h, S - 1, j]``: one vector for the layer, so every head keeps the same
    positions. The last token is kept as the window; the authors' code may drop it.
    """

    reads: ClassVar[Reads] = Reads.WINDOW
    needs_whole_prompt: ClassVar[str] = ""

    def score(self, columns: AttentionStats) -> torch.Tensor:
        """``[Hkv, P]`` float32, equal rows."""
        if columns.last is None:
            raise ValueError("tova needs the attention of the last query; got none")
        heads = columns.last[:, : columns.past].reshape(columns.layers, -1, columns.past)
        row = heads.mean(1, keepdim=True, dtype=torch.float64).float()
        return row.repeat(1, columns.num_kv_heads // columns.layers, 1).flatten(0, 1)
