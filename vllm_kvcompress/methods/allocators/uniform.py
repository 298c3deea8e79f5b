"""The same budget for every layer."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """``b_l = min(B, S) - w`` (SnapKV, StreamingLLM, H2O)."""

    reads: ClassVar[Reads] = Reads.NOTHING
    exact_ratio: ClassVar[bool] = False
    even: ClassVar[bool] = True
    needs_whole_prompt: ClassVar[str] = ""

    def allocate(self, prompt: BudgetSpec, stats: LayerStats | None = None) -> torch.Tensor:
        """``[N]`` int64 on the CPU: equal, at most P."""
        return torch.full((prompt.num_layers,), min(prompt.base, prompt.past), dtype=torch.int64)
