"""TOVA (Oren et al. 2024, arXiv:2401.06104): the attention of the last query alone.

docs/methods.md 4.3.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.preset import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class Tova:
    """TOVA (Oren et al. 2024, arXiv:2401.06104): the last query, averaged over all query heads.

    ``score[j] = mean_h A[h, S - 1, j]``: one vector for the layer, so every head keeps the same
    positions. The window keeps the last token; the authors' code may drop it.
    """

    reads: ClassVar[Reads] = Reads.WINDOW | Reads.LAST | Reads.KV_HEADS
    needs_whole_prompt: ClassVar[str] = ""

    def score(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32, the same for every KV head."""
        if stats.last is None:
            raise ValueError("tova needs the attention of the last query; got none")
        heads = stats.last[:, : stats.past].reshape(stats.num_layers, -1, stats.past)
        mean = heads.mean(1, keepdim=True, dtype=torch.float64).float()
        return mean.repeat(1, stats.num_kv_heads // stats.num_layers, 1).flatten(0, 1)


PRESET = Preset(allocator="uniform", scorer="tova", window=1)
