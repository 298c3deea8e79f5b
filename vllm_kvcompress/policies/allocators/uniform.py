"""The same budget for every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_kvcompress.plan import LayerStats, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """``b_l = min(B, S) - w`` (SnapKV, StreamingLLM, H2O)."""

    needs_stats: ClassVar[bool] = False

    def allocate(self, prompt: Prompt, stats: Sequence[LayerStats] | None = None) -> list[int]:
        """N equal ints, at most P."""
        return [min(prompt.base, prompt.past)] * prompt.num_layers
