"""Layer budgets in proportion to CAKE's preference score."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.apportion import apportion_by_preference
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats

MIN_TAU, MAX_TAU = 0.05, 20.0
"""Range of the temperatures. The authors tuned them between 0.2 and 3."""


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
