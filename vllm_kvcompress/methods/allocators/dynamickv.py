"""Budgets by how many of the highest scores lie in each layer."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.allocators.highest import count_highest, ranked, scores_of
from vllm_kvcompress.methods.base import BY_SCORES, Reads, Use
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.budgets import apportion


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicKV:
    """DynamicKV (Zhou et al. 2024, arXiv:2412.14838, algorithm 1), progressive.

    Each layer first holds ``B_max = min(int(r_max * base), P)``. After every `every` layers, and
    after the last, the ``base * Hkv * n`` highest scores of the n layers so far are counted by
    layer, and layers are cut to shares of the whole budget in proportion. The paper's floors
    fall short of the budget; the authors' code gives what rounding loses to the last layer,
    leaves the layers after the last full group at B_max, and lets a layer grow back over what it
    has dropped. Here the total is exact, the last layer always updates, and nothing grows.

    Args:
        r_max: most that a layer may hold, in mean budgets, > 0 (10 in the paper).
        every: layers between two updates (4).
    """

    reads: ClassVar[Reads] = Reads.SCORES
    exact_ratio: ClassVar[bool] = False
    even: ClassVar[bool] = False
    needs_whole_prompt: ClassVar[str] = BY_SCORES
    uses: ClassVar[tuple[Use, ...]] = (Use.ACROSS_LAYERS,)

    r_max: float = 10.0
    every: int = 4

    def __post_init__(self) -> None:
        if not (self.r_max >= 1 and math.isfinite(self.r_max)):
            raise ConfigError(
                f"dynamickv.r_max must be a finite number >= 1, got {self.r_max}; 10 is usual"
            )
        if self.every < 1:
            raise ConfigError(f"dynamickv.every must be >= 1, got {self.every}; 4 is usual")

    def stages(self, num_layers: int) -> list[int]:
        """Layers known at each update."""
        return [*range(self.every, num_layers, self.every), num_layers]

    def allocate(self, prompt: BudgetSpec, stats: LayerStats | None = None) -> torch.Tensor:
        """``[N]`` int64, past tokens to keep: in [0, B_max], sum at most ``N * min(base, P)``.

        It is less where the caps that earlier updates left hold less. Rounding to pages makes up
        the total then, and may go beyond B_max in doing so.
        """
        scores = ranked(scores_of("dynamickv", stats, prompt.num_layers))
        base, past = min(prompt.base, prompt.past), prompt.past
        limit = min(int(self.r_max * base), past)
        stages = self.stages(prompt.num_layers)
        counts = scores.new_zeros(len(stages), prompt.num_layers, dtype=torch.int64)
        for row, known in enumerate(stages):
            counts[row, :known] = count_highest(scores[:known], base * scores.shape[1] * known)
        return self.settle(counts, prompt.past_total, limit)

    def settle(self, counts: torch.Tensor, total: int, limit: int) -> torch.Tensor:
        """Sizes ``[N]`` int64 after the last update.

        Args:
            counts: ``[updates, N]`` int64; those of layers not yet known are not read.
            total: past tokens over all layers.
            limit: B_max.
        """
        earlier, layers = (torch.arange(n, device=counts.device) for n in counts[1:].shape)
        known = layers < self.every * (1 + earlier[:, None])
        limits = torch.full_like(counts, limit)
        shares = apportion(counts[:-1], total, limits[1:].where(known, 0))
        caps = torch.cat([shares.where(known, limit), limits[:1]]).amin(0)
        return apportion(counts[-1], total, caps)
