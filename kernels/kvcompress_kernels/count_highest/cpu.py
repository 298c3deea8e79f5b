"""Torch code of `count_highest` for a CPU. It reads no tensor values on the host."""

import torch


def run(scores: torch.Tensor, keep: int, layers_per_update: int) -> torch.Tensor:
    layers = len(scores)
    counts = scores.new_zeros(-(-layers // layers_per_update), layers, dtype=torch.int64)
    for update, update_counts in enumerate(counts):
        known = min((update + 1) * layers_per_update, layers)
        update_counts[:known] = _of_update(scores[:known], keep * known // layers)
    return counts


def _of_update(scores: torch.Tensor, keep: int) -> torch.Tensor | int:
    """Return the counts ``[n]`` of the n known layers, or a number that all of them have."""
    if keep == 0:
        return 0
    if keep == scores.numel():
        return scores.shape[1]
    boundary = scores.flatten().kthvalue(scores.numel() - keep + 1).values
    above, tied = (scores > boundary).sum(1), (scores == boundary).sum(1)
    ties_to_count = (keep - above.sum() - tied.cumsum(0) + tied).clamp(min=0)
    return above + torch.minimum(tied, ties_to_count)
