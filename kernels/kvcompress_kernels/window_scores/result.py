"""What the op returns."""

from typing import NamedTuple

import torch


class WindowScores(NamedTuple):
    """What the last w queries of a prompt think of its past, P = tokens - w columns."""

    total: torch.Tensor
    """``[Hq, P]`` float32: attention of the w rows summed, ``sum_i A[h, i, j]``."""
    variance: torch.Tensor | None
    """``[Hq, P]`` float32: sample variance over the w rows (ddof 1), if it was asked for."""
    entropy: torch.Tensor
    """Scalar float32: ``-sum A log A`` over heads, rows and past columns (CAKE's H)."""
    shift: torch.Tensor
    """Scalar float32: `variance` summed over heads and columns (CAKE's V); 0 without it."""
    recent: torch.Tensor
    """``[Hq, w]`` float32: attention of the w rows to the window's own columns, summed."""
    last: torch.Tensor
    """``[Hq, tokens]`` float32: attention of the last row to every key."""
    maximum: torch.Tensor | None = None
    """``[Hq, tokens]`` float32: the most that any of the w rows attends to each key, if it was
    asked for: ``max_i A[h, i, j]``. Of the past columns ``max_i`` of the pooled rows, if those
    were."""
