"""Budgets by how many of all layers' highest scores lie in each layer, in one go."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.methods.base import BY_SCORES, Reads, Use
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.budgets import apportion


@dataclass(frozen=True, slots=True, kw_only=True)
class Global:
    """Layer-DefensiveKV's layers (Feng et al. 2025, arXiv:2510.13334), their heads left equal.

    Scores are divided by their sum over the KV heads and the past of their layer. With c_l of the
    ``N * b * Hkv`` highest of all layers in layer l, ``b = min(base, P)``, sizes are
    ``apportion(c, N * b)``: DynamicKV without its cap and its updates. The authors give each head
    a size of its own, as AdaKV does; here the heads of a layer keep equally many tokens.

    A score of +inf is kept whatever the others are: it counts as higher than every other, and not
    in the sum. NaN and -inf rank last and are not in the sum either. A layer whose sum is 0 has
    nothing to be compared by: its scores stay as they are, behind all others.
    """

    reads: ClassVar[Reads] = Reads.SCORES
    exact_ratio: ClassVar[bool] = False
    even: ClassVar[bool] = False
    needs_whole_prompt: ClassVar[str] = BY_SCORES
    uses: ClassVar[tuple[Use, ...]] = (Use.ACROSS_LAYERS, Use.AS_SHARES)

    def allocate(self, prompt: BudgetSpec, stats: LayerStats | None = None) -> torch.Tensor:
        """``[N]`` int64, past tokens to keep: in [0, P], sum ``N * min(base, P)``."""
        scores = scores_of("global", stats, prompt.num_layers)
        counts = count_highest(shares(scores), prompt.past_total * scores.shape[1])
        caps = torch.full_like(counts, prompt.past)
        return apportion(counts, prompt.past_total, caps)


def shares(scores: torch.Tensor) -> torch.Tensor:
    """``[N, Hkv, P]`` float32: scores that `ranked` would give, over the sums of their layers."""
    finite = torch.nan_to_num(scores, nan=0.0, posinf=0.0, neginf=0.0)
    # float64, so that equal layers stay equal whatever order they are summed in
    total = finite.flatten(1).sum(1, dtype=torch.float64)
    # as large as the scores, and so is what takes its place
    del finite
    # sums that float32 does not hold are clamped too: nothing is divided by 0 or by infinity
    limits = torch.finfo(scores.dtype)
    total = total.clamp(limits.tiny, limits.max).to(scores.dtype)
    return ranked(scores).div_(total[:, None, None])


def ranked(scores: torch.Tensor) -> torch.Tensor:
    """A copy in which NaN ranks last, level with -inf."""
    return torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def scores_of(allocator: str, stats: LayerStats | None, layers: int) -> torch.Tensor:
    """``[N, Hkv, P]`` float32 scores of the layers.

    Raises:
        ValueError: there are none, or not those of `layers` layers.
    """
    scores = None if stats is None else stats.scores
    if scores is None or len(scores) != layers:
        raise ValueError(f"{allocator} needs the scores of {layers} layers")
    return scores


def count_highest(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """How many of the `keep` highest entries lie in each layer, ties to the lower layer.

    Args:
        scores: ``[n, Hkv, P]``, contiguous, as `ranked` has them.
        keep: entries in all; at most all of them are counted.

    Returns:
        ``[n]`` int64.
    """
    flat = scores.flatten(1)
    if keep >= flat.numel():
        return torch.full((len(flat),), flat.shape[1], device=flat.device)
    if keep <= 0:
        return torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
    boundary = flat.flatten().kthvalue(flat.numel() - keep + 1).values
    above, level = (flat > boundary).sum(1), (flat == boundary).sum(1)
    room = (keep - above.sum() - level.cumsum(0) + level).clamp(min=0)
    return above + torch.minimum(level, room)
