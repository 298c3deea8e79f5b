"""Budgets that fall with the variance of the column sums of attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.plan import LayerStats, Prompt
from vllm_kvcompress.policies.base import Reads
from vllm_kvcompress.policies.budgets import apportion

NORMS = ("layer_minmax", "head_minmax", "raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class D2O:
    """D2O (Wan et al. 2024, arXiv:2406.13035, eq. 4 and 5): ``softmax_l(-F_l)`` of the budget.

    F is the mean over query heads of ``v[h] = Var_j c[h, j]``, c the column sums of the whole
    causal attention. As written the softmax is one-hot on long prompts, where one sink makes v
    grow with the prompt; `layer_minmax` scales F to [0, 1] across the layers first. A ratio is
    rounded once: ``round(rho * S * N)`` tokens over all layers, sinks and recents included.

    Args:
        norm: "layer_minmax"; "head_minmax", the authors' code: v scaled to [0, 1] over the heads
            of its layer before the mean; or "raw", the equation as it is written.
        floor: fewest tokens in a layer (8; the authors' code has 1 % of the prompt).
        skip_layers: layers that keep every token as far as the budget goes, counted from the end
            when negative; ``[0, 1, -1]`` in the authors' code. Their tokens come off the total.
    """

    reads: ClassVar[Reads] = Reads.COLUMN_SUMS
    exact_ratio: ClassVar[bool] = True

    norm: str = "layer_minmax"
    floor: int = 8
    skip_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise ConfigError(f"d2o.norm must be one of {list(NORMS)}, got {self.norm!r}")
        if self.floor < 0:
            raise ConfigError(f"d2o.floor must be a whole number >= 0, got {self.floor}")

    def densities(self, stats: Sequence[LayerStats]) -> list[float]:
        """``F_l`` of each layer, scaled as `norm` says."""
        variances = [layer.column_variance for layer in stats]
        if self.norm == "head_minmax":
            variances = [_minmax(v) for v in variances]
        means = [math.fsum(v) / len(v) for v in variances]
        return list(_minmax(means)) if self.norm == "layer_minmax" else means

    def allocate(self, prompt: Prompt, stats: Sequence[LayerStats] | None = None) -> list[int]:
        """Past tokens to keep in each layer: N ints in [0, P], sum `prompt.past_total`."""
        n, past, total = prompt.num_layers, prompt.past, prompt.past_total
        if stats is None or len(stats) != n or not all(s.column_variance for s in stats):
            raise ValueError(f"d2o needs the column variances of {n} layers")
        skipped = {layer % n for layer in self.skip_layers if -n <= layer < n}
        floor = min(max(self.floor - prompt.window, 0), past, total // n)
        whole = 0
        if skipped:
            whole = min(past, (total - floor * (n - len(skipped))) // len(skipped))
        others = [layer for layer in range(n) if layer not in skipped]
        density = self.densities(stats)
        least = min((density[layer] for layer in others), default=0.0)
        weights = [math.exp(least - density[layer]) for layer in others]
        rest = total - whole * len(skipped)
        shares = dict(
            zip(others, apportion(weights, rest, [past] * len(others), floor), strict=True)
        )
        return [shares.get(layer, whole) for layer in range(n)]


def _minmax(values: Sequence[float]) -> tuple[float, ...]:
    low, high = min(values), max(values)
    return tuple((value - low) / (high - low + 1e-6) for value in values)
