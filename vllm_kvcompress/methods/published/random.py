"""Random tokens, the baseline that a method has to beat: docs/methods.md 4.7."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.devices import to_device
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads, ScoreUse
from vllm_kvcompress.methods.budget_spec import AttentionStats
from vllm_kvcompress.methods.preset import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class Random:
    """Seeded uniform scores, drawn for each layer and KV head, the same for every prompt.

    Args:
        seed: seed of the generator, >= 0.
    """

    reads: ClassVar[Reads] = Reads.NOTHING
    needs_whole_prompt: ClassVar[str] = (
        "its random numbers would depend on which requests are compressed together"
    )
    unfit: ClassVar[Mapping[ScoreUse, str]] = {ScoreUse.ACROSS_LAYERS: "ranks at random"}

    max_values: ClassVar[Mapping[str, int]] = {"seed": 2**32 - 1}

    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(
                f"random.seed must be a whole number >= 0, got {self.seed}; the default is 0"
            )

    def score(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32 in [0, 1), the same on every device."""
        heads = stats.num_kv_heads // stats.num_layers
        drawn = torch.empty(stats.num_layers, heads, stats.past)
        for layer, scores in zip(stats.layers, drawn, strict=True):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + layer)
            torch.rand(heads, stats.past, generator=generator, out=scores)
        return to_device(drawn.flatten(0, 1), torch.float32, stats.device)


PRESET = Preset(allocator="uniform", scorer="random", window=32)
