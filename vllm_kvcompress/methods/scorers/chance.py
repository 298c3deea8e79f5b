"""Rank at random: what a method has to beat."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.devices import to_device
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads, Use
from vllm_kvcompress.methods.prompt import Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Random:
    """Seeded uniform scores, drawn anew for each layer and KV head and alike for every prompt.

    Args:
        seed: of the generator, >= 0.
    """

    reads: ClassVar[Reads] = Reads.NOTHING
    needs_whole_prompt: ClassVar[str] = "what it draws would depend on the answers packed beside it"
    unfit: ClassVar[Mapping[Use, str]] = {Use.ACROSS_LAYERS: "ranks at random"}

    largest: ClassVar[Mapping[str, int]] = {"seed": 2**32 - 1}

    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(
                f"random.seed must be a whole number >= 0, got {self.seed}; 0 is usual"
            )

    def score(self, columns: Columns) -> torch.Tensor:
        """``[Hkv, P]`` float32 in [0, 1), the same on every device."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + columns.layer)
        drawn = torch.rand(columns.num_kv_heads, columns.past, generator=generator)
        return to_device(drawn, torch.float32, columns.device)
