"""Budgets that fall with the variance of the column sums of attention."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import BY_QUERIES, Reads
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.budgets import apportion

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
        per_query: take the variance of the columns' means over the rows that see them. It is the
            allocator's own: scorer `h2o` has a parameter of that name for the ranking.
    """

    exact_ratio: ClassVar[bool] = True
    even: ClassVar[bool] = False

    norm: str = "layer_minmax"
    floor: int = 8
    skip_layers: tuple[int, ...] = ()
    per_query: bool = False

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise ConfigError(f"d2o.norm must be one of {list(NORMS)}, got {self.norm!r}")
        if self.floor < 0:
            raise ConfigError(f"d2o.floor must be a whole number >= 0, got {self.floor}")

    @property
    def reads(self) -> Reads:
        return Reads.COLUMN_SUMS | (Reads.COLUMN_MEANS if self.per_query else Reads.NOTHING)

    @property
    def needs_whole_prompt(self) -> str:
        return BY_QUERIES if self.per_query else ""

    def densities(self, variance: torch.Tensor) -> torch.Tensor:
        """``[N]`` float64 ``F_l``, scaled as `norm` says, of column variances ``[N, Hq]``."""
        variance = variance.double()
        if self.norm == "head_minmax":
            variance = _minmax(variance)
        mean = variance.mean(-1)
        return _minmax(mean) if self.norm == "layer_minmax" else mean

    def allocate(self, prompt: BudgetSpec, stats: LayerStats | None = None) -> torch.Tensor:
        """``[N]`` int64, past tokens to keep: in [0, P], sum `prompt.past_total`."""
        n, past, total = prompt.num_layers, prompt.past, prompt.past_total
        variance = None if stats is None else stats.column_variance
        if variance is None or len(variance) != n or variance.shape[1] == 0:
            raise ValueError(f"d2o needs the column variances of {n} layers")
        skipped = sorted({layer % n for layer in self.skip_layers if -n <= layer < n})
        floor = min(max(self.floor - prompt.window, 0), past, total // n)
        whole = 0
        if skipped:
            whole = min(past, (total - floor * (n - len(skipped))) // len(skipped))
        density, caps = self.densities(variance), variance.new_full((n,), past, dtype=torch.int64)
        fixed = torch.zeros_like(caps)
        for layer in skipped:
            # a number that is put into one place would be copied from the host, and waited for
            density[layer].fill_(torch.inf)
            caps[layer].fill_(0)
            fixed[layer].fill_(whole)
        weights = (density.amin() - density).exp()
        return fixed + apportion(weights, total - whole * len(skipped), caps, floor)


def _minmax(values: torch.Tensor) -> torch.Tensor:
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    return (values - low) / (high - low + 1e-6)
