"""Budgets in proportion to each layer's preference for a large cache."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.plan import LayerStats, Prompt
from vllm_kvcompress.policies.base import Reads
from vllm_kvcompress.policies.budgets import apportion, pour


@dataclass(frozen=True, slots=True, kw_only=True)
class Cake:
    """CAKE (Qin et al. 2025, arXiv:2503.12491, eq. 5 to 8): entropy and shift of attention.

    ``P_l = H_l ** (1 / tau1) * V_l ** (1 / tau2)``, budgets proportional to it. Combined in logs,
    float64, with the maximum subtracted: with tau2 = 0.4 raw values span many decades. The
    authors' code truncates and spreads the rest evenly, and loses tokens when a layer is full;
    here the total is exact and full layers leave their share to the others in proportion.

    Args:
        tau1: temperature of the entropy, > 0. The paper searched 0.2 to 2; 1 is neutral.
        tau2: temperature of the shift, > 0. The paper searched 0.4 to 3; 1 is neutral.
    """

    reads: ClassVar[Reads] = Reads.WINDOW | Reads.VARIANCE
    exact_ratio: ClassVar[bool] = False

    tau1: float = 1.0
    tau2: float = 1.0

    def __post_init__(self) -> None:
        for name, tau in (("tau1", self.tau1), ("tau2", self.tau2)):
            if not (tau > 0 and math.isfinite(tau)):
                raise ConfigError(
                    f"cake.{name} must be a finite number > 0, got {tau}; 1 is neutral"
                )

    def preferences(self, stats: Sequence[LayerStats]) -> list[float]:
        """``P_l`` divided by the largest; 0 where H or V is 0."""
        logs = [
            math.log(s.entropy) / self.tau1 + math.log(s.shift) / self.tau2
            if s.entropy > 0 and s.shift > 0
            else -math.inf
            for s in stats
        ]
        top = max(logs, default=-math.inf)
        if top == -math.inf:
            return [0.0] * len(logs)
        return [math.exp(value - top) for value in logs]

    def allocate(self, prompt: Prompt, stats: Sequence[LayerStats] | None = None) -> list[int]:
        """Past tokens to keep in each layer: N ints in [0, P], sum ``N * min(base, P)``."""
        n, past = prompt.num_layers, prompt.past
        if stats is None or len(stats) != n:
            raise ValueError(f"cake needs the statistics of {n} layers, got {stats and len(stats)}")
        return apportion(self.preferences(stats), prompt.past_total, [past] * n)

    def cascade(self, prompt: Prompt, stats: Sequence[LayerStats]) -> Iterator[list[int]]:
        """Past tokens held by the layers so far, after each layer (CAKE, algorithm 1).

        A layer may be cut to its size as soon as the next ones are known: sizes never grow, the
        sum after layer m is at most the total budget + m + 1, and the last stage is `allocate`.
        Stages round up, because a layer that joins can only lower the others' level.
        """
        total, past = prompt.past_total, prompt.past
        held: list[int] = []
        for stage in range(1, prompt.num_layers):
            shares = pour(self.preferences(stats[:stage]), total, [past] * stage)
            bounds = [math.ceil(x - 1e-9) for x in shares]
            held = [min(*pair) for pair in zip([*held, past], bounds, strict=True)]
            yield list(held)
        yield self.allocate(prompt, stats)
