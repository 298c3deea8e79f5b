"""The same budget for every layer."""

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
