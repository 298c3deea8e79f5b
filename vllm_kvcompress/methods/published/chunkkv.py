"""ChunkKV (Liu et al. 2025, arXiv:2502.00299): keep runs of tokens instead of single tokens.

docs/methods.md 5. Tokens are scored as in `snapkv`, without pooling.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.select import select_chunks
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import ScoreUse
from vllm_kvcompress.methods.parts.topk import per_row
from vllm_kvcompress.methods.preset import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """ChunkKV (Liu et al. 2025, arXiv:2502.00299, algorithms 1 and 2): keep runs of tokens.

    A chunk's score is the mean of its tokens' scores, summed over KV heads. Ties go to the earlier
    chunk. If the last chosen chunk does not fit, its first tokens are kept, so that exactly `keep`
    tokens are kept; the paper's floor of complete chunks and kvpress's share of chunks miss the
    budget. Layers that reuse a ranking fill their own budget from it.

    Args:
        size: tokens in a chunk (10 in the paper, 20 in kvpress).
        shared: one ranking for all heads of the layer; False ranks per KV head.
        reuse: number of layers that share the first one's ranking (N_reuse); 1 means no reuse.
    """

    uses: ClassVar[tuple[ScoreUse, ...]] = (ScoreUse.AS_WEIGHTS,)

    size: int = 10
    shared: bool = True
    reuse: int = 1

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("reuse", self.reuse)):
            if value < 1:
                raise ConfigError(f"chunks.{name} must be a whole number >= 1, got {value}")

    def source(self, layer: int) -> int:
        return layer // self.reuse * self.reuse

    def protect(self, scores: torch.Tensor, keep: torch.Tensor, kept_after: int) -> torch.Tensor:
        return scores

    def select(
        self,
        scores: torch.Tensor,
        past: int | torch.Tensor,
        keep: torch.Tensor,
        kept_after: int,
        width: int,
    ) -> torch.Tensor:
        """Return ``[L, Hkv, width]`` int32 positions (`kvcompress_kernels.select_chunks`)."""
        layers, heads, _ = scores.shape
        heads_per_ranking = heads if self.shared else 1
        counts = per_row(keep, heads // heads_per_ranking)
        rows = scores.flatten(0, 1)
        columns = per_row(past, heads // heads_per_ranking)
        best = select_chunks(rows, columns, counts, width, size=self.size, heads=heads_per_ranking)
        return best.view(layers, heads // heads_per_ranking, width).expand(-1, heads, -1)


PRESET = Preset(
    allocator="uniform",
    scorer="snapkv",
    window=32,
    selector="chunks",
    scorer_params=(("kernel", 1),),
)
