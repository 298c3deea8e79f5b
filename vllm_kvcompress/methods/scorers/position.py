"""Rank by position alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads, Use
from vllm_kvcompress.methods.budget_spec import AttentionStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLLM:
    """StreamingLLM (Xiao et al. 2023, arXiv:2309.17453): first tokens and the latest ones.

    Original positions are kept; the authors' code rotates keys anew by cache slot.

    Args:
        sinks: first tokens that are kept before any other (4 in the paper).
    """

    reads: ClassVar[Reads] = Reads.NOTHING
    needs_whole_prompt: ClassVar[str] = ""
    unfit: ClassVar[Mapping[Use, str]] = dict.fromkeys(
        (Use.ACROSS_LAYERS, Use.AS_WEIGHTS), "ranks by position"
    )

    sinks: int = 4

    def __post_init__(self) -> None:
        if not (isinstance(self.sinks, int) and self.sinks >= 0):
            raise ConfigError(
                f"streamingllm.sinks must be a whole number >= 0, got {self.sinks}; 4 is usual"
            )

    def score(self, columns: AttentionStats) -> torch.Tensor:
        """``[Hkv, P]`` float32: +inf for sinks, then the position. Exact below 2**24 tokens."""
        position = torch.arange(columns.past, dtype=torch.float32, device=columns.device)
        position[: self.sinks] = torch.inf
        return position.expand(columns.num_kv_heads, -1)
