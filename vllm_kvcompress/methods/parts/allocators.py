"""Allocator `uniform`, and code of the allocators that compare scores between layers."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """``b_l = min(B, S) - w`` for every layer (SnapKV, StreamingLLM, H2O)."""

    reads: ClassVar[Reads] = Reads.NOTHING
    exact_ratio: ClassVar[bool] = False
    equal_shares: ClassVar[bool] = True
    needs_whole_prompt: ClassVar[str] = ""

    def allocate(self, spec: BudgetSpec, stats: LayerStats | None = None) -> torch.Tensor:
        """Return ``[N]`` int64 on the CPU, equal for all layers and at most P."""
        return torch.full((spec.num_layers,), min(spec.base, spec.past), dtype=torch.int64)


def ranked(scores: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in which NaN ranks last, equal to -inf."""
    copy = torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return copy.contiguous()


def scores_of(allocator: str, stats: LayerStats | None, layers: int) -> torch.Tensor:
    """Return the ``[N, Hkv, P]`` float32 scores of the layers.

    Raises:
        ValueError: there are no scores, or they are not of `layers` layers.
    """
    scores = None if stats is None else stats.scores
    if scores is None or len(scores) != layers:
        raise ValueError(f"{allocator} needs the scores of {layers} layers")
    return scores
