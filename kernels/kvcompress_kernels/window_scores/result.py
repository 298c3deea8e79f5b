"""What the op returns."""

from typing import NamedTuple

import torch


class WindowScores(NamedTuple):
    """What the last w queries of a prompt think of its past, P = tokens - w columns.

    Of several rows together every part has a leading axis.
    """

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

    def row(self, index: int) -> "WindowScores":
        """One of several rows."""
        variance, maximum = self.variance, self.maximum
        return WindowScores(
            total=self.total[index],
            variance=None if variance is None else variance[index],
            entropy=self.entropy[index],
            shift=self.shift[index],
            recent=self.recent[index],
            last=self.last[index],
            maximum=None if maximum is None else maximum[index],
        )
