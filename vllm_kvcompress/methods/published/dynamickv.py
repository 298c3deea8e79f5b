"""DynamicKV (Zhou et al. 2024, arXiv:2412.14838): budgets by the highest scores in each layer.

docs/methods.md 2.4. Tokens are scored as in `snapkv`, with a window of 8.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.apportion import apportion
from kvcompress_kernels.count_highest import count_highest
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import COMPARES_ALL_SCORES, Reads, ScoreUse
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.parts.allocators import ranked, scores_of
from vllm_kvcompress.methods.preset import ParamsByModel, Preset, params_of_model

R_MAX: ParamsByModel[float] = (
    (("llama-3-8b",), 10.0),
    (("mistral-7b", "v0.2"), 10.0),
    (("qwen2-7b",), 10.0),
    (("internlm2_5-7b",), 10.0),
)
"""r_max by model. The paper states 10 for all models; the authors' scripts use 5 for Qwen2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicKV:
    """DynamicKV (Zhou et al. 2024, arXiv:2412.14838, algorithm 1), progressive.

    Each layer first holds ``B_max = min(int(r_max * base), P)`` tokens. After every `every` layers,
    and after the last, the ``base * Hkv * n`` highest scores of the n layers so far are counted by
    layer, and the layers are cut to shares of the total budget in proportion. The paper's floors
    fall short of the budget. The authors' code gives rounding losses to the last layer, leaves the
    layers after the last full group at B_max, and lets a layer grow back over dropped tokens. Here
    the total is exact, the last layer always updates, and no layer grows.

    Args:
        r_max: maximum tokens of a layer as a multiple of the mean budget, >= 1 (10 in the paper).
        every: layers between two updates (4).
    """

    reads: ClassVar[Reads] = Reads.SCORES
    exact_ratio: ClassVar[bool] = False
    equal_shares: ClassVar[bool] = False
    needs_whole_prompt: ClassVar[str] = COMPARES_ALL_SCORES
    uses: ClassVar[tuple[ScoreUse, ...]] = (ScoreUse.ACROSS_LAYERS,)

    r_max: float = 10.0
    every: int = 4

    def __post_init__(self) -> None:
        if not (self.r_max >= 1 and math.isfinite(self.r_max)):
            raise ConfigError(
                f"dynamickv.r_max must be a finite number >= 1, got {self.r_max}; the default is 10"
            )
        if self.every < 1:
            raise ConfigError(f"dynamickv.every must be >= 1, got {self.every}; the default is 4")

    def allocate(self, spec: BudgetSpec, stats: LayerStats | None = None) -> torch.Tensor:
        """Return ``[N]`` int64, past tokens to keep, in [0, B_max].

        The sum is at most ``N * min(base, P)``, and less if the caps of earlier updates hold less.
        Rounding to pages then restores the total, and may exceed B_max in doing so.
        """
        scores = ranked(scores_of("dynamickv", stats, spec.num_layers))
        base, past = min(spec.base, spec.past), spec.past
        limit = min(int(self.r_max * base), past)
        keep = base * scores.shape[1] * spec.num_layers
        counts = count_highest(scores.flatten(1), keep, self.every)
        return self.settle(counts, spec.past_total, limit)

    def settle(self, counts: torch.Tensor, total: int, limit: int) -> torch.Tensor:
        """Return the layers' sizes ``[N]`` int64 after the last update.

        Args:
            counts: ``[updates, N]`` int64. Counts of layers not known at an update are not read.
            total: past tokens over all layers.
            limit: B_max.
        """
        (updates, num_layers), device = counts.shape, counts.device
        # 0 for the last update, which is the result and limits no layer
        period = self.every * updates
        num_known = torch.arange(self.every, period + 1, self.every, device=device) % period
        known = torch.arange(num_layers, device=device) < num_known[:, None]
        shares = apportion(counts, total, known * limit)
        return apportion(counts[-1], total, shares.where(known, limit).amin(0))


def published(model: str | None, budget: float | int) -> Mapping[str, float]:
    """Return the paper's r_max for a model; empty if it does not report on the model."""
    r_max = params_of_model(R_MAX, model)
    return {} if r_max is None else {"r_max": r_max}


PRESET = Preset(allocator="dynamickv", scorer="snapkv", window=8)
