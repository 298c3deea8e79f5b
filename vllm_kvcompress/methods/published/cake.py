"""CAKE (Qin et al. 2025, arXiv:2503.12491): budgets and scores from how attention varies.

docs/methods.md 2.3 (allocator, eq. 5 to 8) and 4.5 (scorer, eq. 9).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.apportion import apportion_by_preference
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import AttentionStats, BudgetSpec, LayerStats
from vllm_kvcompress.methods.parts import pooling
from vllm_kvcompress.methods.preset import ParamsByModel, Preset, params_of_model

MIN_TAU, MAX_TAU = 0.05, 20.0
"""Range of the temperatures. The authors tuned them between 0.2 and 3."""

_Temperatures = Mapping[int, tuple[float, float]]
TEMPERATURES: ParamsByModel[_Temperatures] = (
    (("llama-3.1-8b",), {128: (1.6, 0.6), 1024: (1.6, 0.4)}),
    (("llama-2-7b", "chat"), {128: (0.9, 2.3), 1024: (1.9, 1.8)}),
    (("llama-2-13b", "chat"), {128: (1.8, 2.0), 1024: (0.5, 0.4)}),
    (("mistral-7b", "v0.3"), {128: (1.0, 0.8), 1024: (0.8, 0.5)}),
    (("qwen2.5-7b",), {128: (0.4, 0.6), 1024: (1.5, 0.6)}),
)
"""tau1 and tau2 by model and budget in tokens per layer, from ``model2tau.json`` of the authors'
repository (antgroup/cakekv). Their code uses 1 and 1 for any other model or budget, and so do we.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cake:
    """CAKE (Qin et al. 2025, arXiv:2503.12491, eq. 5 to 8): entropy and shift of attention.

    Budgets are proportional to ``P_l = H_l ** (1 / tau1) * V_l ** (1 / tau2)``. P is computed in
    logarithms in float64 with the maximum subtracted: with tau2 = 0.4 the raw values span many
    decades. The authors' code truncates and spreads the rest evenly, and loses tokens when a layer
    is full; here the total is exact, and a full layer's excess goes to the other layers in
    proportion.

    Args:
        tau1: temperature of the entropy, > 0. The paper searched 0.2 to 2; 1 is neutral.
        tau2: temperature of the shift, > 0. The paper searched 0.4 to 3; 1 is neutral.
    """

    reads: ClassVar[Reads] = Reads.WINDOW | Reads.VARIANCE
    exact_ratio: ClassVar[bool] = False
    equal_shares: ClassVar[bool] = False
    needs_whole_prompt: ClassVar[str] = ""

    tau1: float = 1.0
    tau2: float = 1.0

    def __post_init__(self) -> None:
        for name, tau in (("tau1", self.tau1), ("tau2", self.tau2)):
            if not MIN_TAU <= tau <= MAX_TAU:
                raise ConfigError(
                    f"cake.{name} must be between {MIN_TAU:g} and {MAX_TAU:g}, got {tau}; 1 is"
                    " neutral"
                )

    def allocate(self, spec: BudgetSpec, stats: LayerStats | None = None) -> torch.Tensor:
        """Return ``[N]`` int64, past tokens to keep, in [0, P] with sum ``N * min(base, P)``."""
        entropy, shift = _entropy_and_shift(stats, spec.num_layers)
        return apportion_by_preference(
            entropy, shift, spec.past_total, spec.past, tau1=self.tau1, tau2=self.tau2
        )


def _entropy_and_shift(stats: LayerStats | None, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return H and V, each ``[N]``, after checking that all layers have them."""
    entropy, shift = (None, None) if stats is None else (stats.entropy, stats.shift)
    if entropy is None or shift is None or not len(entropy) == len(shift) == layers:
        got = "none" if entropy is None else len(entropy)
        raise ValueError(f"cake needs the statistics of {layers} layers, got {got}")
    return entropy, shift


@dataclass(frozen=True, slots=True, kw_only=True)
class CakeIndicator:
    """CAKE's eviction indicator (Qin et al. 2025, arXiv:2503.12491, eq. 9): mean + gamma * Var.

    ``score[g] = mean_{h in g} avgpool(m[h] + gamma * r[h])`` with the sample variance (ddof 1), in
    float32. The authors' code works in the model's dtype, where small variances become zero.

    Args:
        gamma: weight of the variance, >= 0 (200 in the paper).
        kernel: average pooling width in tokens, odd.
    """

    reads: ClassVar[Reads] = Reads.WINDOW | Reads.VARIANCE | Reads.KV_HEADS
    needs_whole_prompt: ClassVar[str] = ""

    gamma: float = 200.0
    kernel: int = 5

    def __post_init__(self) -> None:
        if not (self.gamma >= 0 and math.isfinite(self.gamma)):
            raise ConfigError(f"cake.gamma must be a finite number >= 0, got {self.gamma}")
        pooling.check("cake", "avg", self.kernel)

    def score(self, stats: AttentionStats) -> torch.Tensor:
        """Return ``[Hkv, P]`` float32 scores."""
        if stats.total is None or stats.variance is None:
            raise ValueError("cake needs the window's attention and its variance; got none")
        indicator = stats.total / stats.num_queries + self.gamma * stats.variance
        if len(indicator) > stats.num_kv_heads:
            indicator = pooling.group_mean(indicator, stats.num_kv_heads)
        return pooling.pool(indicator, "avg", self.kernel)


def published(model: str | None, budget: float | int) -> Mapping[str, float]:
    """Return the authors' temperatures for a model and budget; empty if they publish none.

    Args:
        model: name or path, such as ``meta-llama/Llama-3.1-8B-Instruct``.
        budget: tokens per layer (int), or a ratio (float), for which nothing is published.
    """
    of_budgets = params_of_model(TEMPERATURES, model)
    if of_budgets is None or not isinstance(budget, int) or budget not in of_budgets:
        return {}
    tau1, tau2 = of_budgets[budget]
    return {"tau1": tau1, "tau2": tau2}


PRESET = Preset(allocator="cake", scorer="cake", window=32)
