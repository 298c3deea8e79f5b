"""Reference for `value_scores` in float64, one query head at a time.

Each row of `value_scores_of_rows` must match it on the row's own tokens.
"""

import torch
from torch.linalg import vector_norm

from kvcompress_kernels.cached_prompt import cached_values


def run(
    weights: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    fast: bool,
    reduce: str,
) -> torch.Tensor:
    scores = []
    values = cached_values(value_pages, pages, tokens)
    for v, group in zip(values, weights.double().chunk(len(values)), strict=True):
        changes = torch.stack([_change(h, v, fast) for h in group])
        scores.append(changes.mean(0) if reduce == "mean" else vector_norm(changes, dim=0))
    return torch.stack(scores).float()


def _change(h: torch.Tensor, v: torch.Tensor, fast: bool) -> torch.Tensor:
    """Return how much evicting each token changes one query head's output, ``[tokens]``.

    Args:
        h: attention weights ``[tokens]``.
        v: values ``[tokens, D]``.
        fast: use the unweighted mean of the values for the output.
    """
    o = v.mean(0) if fast else h @ v
    left = 1 - h
    heaviest = int(h.argmax())
    others = h.clone()
    others[heaviest] = 0
    rest = others.sum()
    dominant = bool(h[heaviest] > 0.5 and rest > 0)
    if dominant:
        left[heaviest] = rest
    change: torch.Tensor = h / left.clamp_min(1e-6) * vector_norm(o - v, dim=-1)
    if dominant and not fast:
        change[heaviest] = h[heaviest] * vector_norm(others @ v / rest - v[heaviest])
    return change
