"""The same budget for every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_kvcompress.plan import LayerStats, Prompt
from vllm_kvcompress.policies.base import Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """``b_l = min(B, S) - w`` (SnapKV, StreamingLLM, H2O)."""

    reads: ClassVar[Reads] = Reads.NOTHING
    exact_ratio: ClassVar[bool] = False

    def allocate(self, prompt: Prompt, stats: Sequence[LayerStats] | None = None) -> list[int]:
        """N equal ints, at most P."""
        return [min(prompt.base, prompt.past)] * prompt.num_layers
