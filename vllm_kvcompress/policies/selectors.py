"""From scores to positions."""

from collections.abc import Callable, Mapping

import torch

Selector = Callable[[torch.Tensor, int], torch.Tensor]


def top_k(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """The `keep` best positions of each KV head, exact ties included.

    Higher scores first, then lower positions: max pooling makes plateaus of equal scores, so ties
    at the boundary are the normal case, and ``torch.topk`` leaves their order open. NaN ranks
    last, level with -inf.

    Args:
        scores: ``[Hkv, n]`` float32.
        keep: 0 to n.

    Returns:
        ``[Hkv, keep]`` int64, ascending.

    Raises:
        ValueError: `keep` is outside 0 to n.
    """
    heads, n = scores.shape
    if not 0 <= keep <= n:
        raise ValueError(f"top_k: keep must be in 0..{n}, got {keep}")
    if keep == 0:
        return torch.empty(heads, 0, dtype=torch.int64, device=scores.device)
    if keep == n:
        return torch.arange(n, device=scores.device).expand(heads, n)
    scores = torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    boundary = scores.topk(keep, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, level = scores > boundary, scores == boundary
    room = keep - above.sum(-1, keepdim=True)
    kept = above | (level & (level.cumsum(-1) <= room))
    # the count is known: unlike nonzero, this need not ask a GPU for it
    return torch.nonzero_static(kept, size=heads * keep)[:, 1].view(heads, keep)


SELECTORS: Mapping[str, Selector] = {"topk": top_k}
