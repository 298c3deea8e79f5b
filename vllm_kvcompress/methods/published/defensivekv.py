"""DefensiveKV and Layer-DefensiveKV (Feng et al. 2025, arXiv:2510.13334): the worst case.

Both are scorer `snapkv` with the paper's aggregate (`parts.aggregates`) and value norms. The layer
budgets are allocator `global`, docs/methods.md 2.6. The paper's heads share a
layer's budget as in AdaKV, and its norm of a value is taken behind the output projection; here the
heads keep equally many tokens, and the norm is the cached value's.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress_kernels.apportion import apportion
from kvcompress_kernels.count_highest import count_highest
from vllm_kvcompress.methods.base import COMPARES_ALL_SCORES, Reads, ScoreUse
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.parts.allocators import ranked, scores_of
from vllm_kvcompress.methods.preset import Params, Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class Global:
    """Layer-DefensiveKV's layer budgets (Feng et al. 2025, arXiv:2510.13334), with equal heads.

    Scores are divided by their sum over the KV heads and the past of their layer. If c_l of the ``N
    * b * Hkv`` highest scores of all layers are in layer l, ``b = min(base, P)``, sizes are
    ``apportion(c, N * b)``: DynamicKV without its cap and its updates. In the authors' code each
    head has its own size, as in AdaKV; here the heads of a layer keep equally many tokens.

    A score of +inf ranks first and is not in the sum. NaN and -inf rank last and are not in the sum
    either. If a layer's sum is 0, its scores are not scaled and rank after all other scores.
    """

    reads: ClassVar[Reads] = Reads.SCORES
    exact_ratio: ClassVar[bool] = False
    equal_shares: ClassVar[bool] = False
    needs_whole_prompt: ClassVar[str] = COMPARES_ALL_SCORES
    uses: ClassVar[tuple[ScoreUse, ...]] = (ScoreUse.ACROSS_LAYERS, ScoreUse.AS_SHARES)

    def allocate(self, spec: BudgetSpec, stats: LayerStats | None = None) -> torch.Tensor:
        """Return ``[N]`` int64, past tokens to keep, in [0, P] with sum ``N * min(base, P)``."""
        scores = scores_of("global", stats, spec.num_layers)
        keep = spec.past_total * scores.shape[1]
        flat_shares = shares(scores).flatten(1)
        counts = count_highest(flat_shares, keep, layers_per_update=spec.num_layers)[0]
        return apportion(counts, spec.past_total, spec.past)


def shares(scores: torch.Tensor) -> torch.Tensor:
    """Return ``[N, Hkv, P]`` float32, `ranked` scores divided by the sums of their layers."""
    finite = torch.nan_to_num(scores, nan=0.0, posinf=0.0, neginf=0.0)
    # float64, so that equal layers stay equal whatever the order of summation
    total = finite.flatten(1).sum(1, dtype=torch.float64)
    # frees it before `ranked` allocates another tensor of this size
    del finite
    # Sums outside float32's range are clamped too, so nothing is divided by 0 or infinity.
    limits = torch.finfo(scores.dtype)
    total = total.clamp(limits.tiny, limits.max).to(scores.dtype)
    return ranked(scores).div_(total[:, None, None])


_WORST_CASE: Params = (("aggregate", "defensive"), ("value_norm", True))

PRESET = Preset(allocator="uniform", scorer="snapkv", window=32, scorer_params=_WORST_CASE)
LAYER_PRESET = Preset(allocator="global", scorer="snapkv", window=32, scorer_params=_WORST_CASE)
