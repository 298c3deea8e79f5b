"""D2O (Wan et al. 2024, arXiv:2406.13035): layer budgets, heavy hitters and merging.

docs/methods.md 2.5 (allocator, eq. 4 and 5) and 6 (selector and merging). Tokens are scored as in
`h2o`; `kvcompress_kernels.merge_evicted` merges.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.apportion import apportion
from kvcompress_kernels.select import select
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import COUNTS_QUERIES, Reads, ScoreUse
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.parts.topk import per_row
from vllm_kvcompress.methods.preset import Preset

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyRecent:
    """D2O's split (Wan et al. 2024, arXiv:2406.13035): sinks, heavy hitters and recent tokens.

    Of n kept tokens, the first ``T = min(sinks, n)`` and the last ``M = min(n - T, floor(n *
    recent))`` tokens are always kept. The other kept tokens are the best between them.

    Args:
        sinks: first tokens that are always kept (4 in the authors' code; the paper gives none).
        recent: share of the kept tokens that are the last ones (1/4: heavy : recent = 3 : 1).
    """

    uses: ClassVar[tuple[ScoreUse, ...]] = (ScoreUse.AS_WEIGHTS,)

    sinks: int = 4
    recent: float = 0.25

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(f"heavy_recent.sinks must be a whole number >= 0, got {self.sinks}")
        if not 0 <= self.recent <= 1:
            raise ConfigError(f"heavy_recent.recent must be in [0, 1], got {self.recent}")

    def source(self, layer: int) -> int:
        return layer

    def protect(self, scores: torch.Tensor, keep: torch.Tensor, kept_after: int) -> torch.Tensor:
        """Return `scores` ``[L, Hkv, n]``, +inf at sinks and recent tokens and finite elsewhere."""
        past, top = scores.shape[2], torch.finfo(scores.dtype).max
        sinks = keep.clamp(max=self.sinks)
        recents = self._recents(keep, kept_after).minimum(keep - sinks)
        column = torch.arange(past, device=scores.device)
        always_kept = (column < sinks[:, None]) | (column >= past - recents[:, None])
        finite = torch.nan_to_num(scores, nan=-torch.inf, posinf=top, neginf=-torch.inf)
        return finite.where(~always_kept[:, None], torch.inf)

    def select(
        self,
        scores: torch.Tensor,
        past: int | torch.Tensor,
        keep: torch.Tensor,
        kept_after: int,
        width: int,
    ) -> torch.Tensor:
        """Return ``[L, Hkv, width]`` int32 positions (`kvcompress_kernels.select`)."""
        rows, heads = scores.flatten(0, 1), scores.shape[1]
        recents = per_row(self._recents(keep, kept_after), heads)
        columns, counts = per_row(past, heads), per_row(keep, heads)
        best = select(rows, columns, counts, width, num_first=self.sinks, num_last=recents)
        return best.view(*scores.shape[:2], width)

    def _recents(self, keep: torch.Tensor, kept_after: int) -> torch.Tensor:
        """Return how many of the `keep` tokens are recent, given the tokens kept after them."""
        return ((keep + kept_after).double() * self.recent).long().sub(kept_after).clamp(min=0)


PRESET = Preset(allocator="d2o", scorer="h2o", window=0, selector="heavy_recent", merge=True)
