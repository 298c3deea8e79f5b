"""Layer budgets that decrease with the variance of the attention's column sums."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import COUNTS_QUERIES, Reads
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.budgets import apportion

NORMS = ("layer_minmax", "head_minmax", "raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class D2O:
    """D2O (Wan et al. 2024, arXiv:2406.13035, eq. 4 and 5): ``softmax_l(-F_l)`` of the budget.

    F is the mean over query heads of ``v[h] = Var_j c[h, j]``, with c the column sums of the whole
    causal attention. As written, the softmax is one-hot on long prompts, where one sink makes v
    grow with the prompt; `layer_minmax` scales F to [0, 1] across the layers first. A ratio is
    rounded once: ``round(rho * S * N)`` tokens over all layers, sinks and recent tokens included.

    Args:
        norm: "layer_minmax"; "head_minmax", as in the authors' code: v scaled to [0, 1] over the
            heads of its layer before the mean; or "raw", the equation as written.
        floor: minimum tokens per layer (8; 1 % of the prompt in the authors' code).
        skip_layers: layers that keep all tokens if the budget allows it, counted from the end if
            negative; ``[0, 1, -1]`` in the authors' code. Their tokens are subtracted from the
            total.
        per_query: take the variance of the column means over the queries that see them. This
            affects only the allocator; scorer `h2o` has a parameter of the same name for its
            ranking.
    """

    exact_ratio: ClassVar[bool] = True
    equal_shares: ClassVar[bool] = False

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
        return COUNTS_QUERIES if self.per_query else ""

    def densities(self, variance: torch.Tensor) -> torch.Tensor:
        """Return ``[N]`` float64 ``F_l``, scaled as `norm` says.

        Args:
            variance: ``[N, Hq]`` variances of the column sums or means.
        """
        variance = variance.double()
        if self.norm == "head_minmax":
            variance = _minmax(variance)
        mean = variance.mean(-1)
        return _minmax(mean) if self.norm == "layer_minmax" else mean

    def allocate(self, spec: BudgetSpec, stats: LayerStats | None = None) -> torch.Tensor:
        """Return ``[N]`` int64, past tokens to keep, in [0, P] with sum `spec.past_total`."""
        n, past, total = spec.num_layers, spec.past, spec.past_total
        variance = None if stats is None else stats.column_variance
        if variance is None or len(variance) != n or variance.shape[1] == 0:
            raise ValueError(f"d2o needs the column variances of {n} layers")
        skipped = sorted({layer % n for layer in self.skip_layers if -n <= layer < n})
        floor = min(max(self.floor - spec.window, 0), past, total // n)
        density = self.densities(variance)
        if not skipped:
            return apportion((density.amin() - density).exp(), total, past, floor)
        skipped_tokens = min(past, (total - floor * (n - len(skipped))) // len(skipped))
        caps = variance.new_full((n,), past, dtype=torch.int64)
        fixed = torch.zeros_like(caps)
        for layer in skipped:
            # fill_ on a view avoids the host-to-device copy and the wait of an item assignment
            density[layer].fill_(torch.inf)
            caps[layer].fill_(0)
            fixed[layer].fill_(skipped_tokens)
        weights = (density.amin() - density).exp()
        return fixed + apportion(weights, total - skipped_tokens * len(skipped), caps, floor)


def _minmax(values: torch.Tensor) -> torch.Tensor:
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    return (values - low) / (high - low + 1e-6)
