"""Result type of `window_scores`."""

from typing import NamedTuple

import torch


class Outputs(NamedTuple):
    """Which statistics `window_scores` returns. Fields are its arguments of the same names."""

    variance: bool
    maximum: bool = False
    pooled: bool = False
    last: bool = True
    grouped: bool = False


class WindowScores(NamedTuple):
    """Attention A of a prompt's last w queries, reduced over these w rows.

    The past is the P = tokens - w columns before the window. If a call scores several rows, every
    field has a leading axis. A `grouped` call returns ``Hkv`` instead of ``Hq`` lines: each is the
    mean over the query heads of a KV head, and in `maximum` their maximum.
    """

    total: torch.Tensor
    """``[Hq, P]`` float32: sum of the attention to each past column, ``sum_i A[h, i, j]``."""
    variance: torch.Tensor | None
    """``[Hq, P]`` float32: sample variance over the w rows (ddof 1). None unless requested."""
    entropy: torch.Tensor
    """Scalar float32: ``-sum A log A`` over heads, rows and past columns (CAKE's H)."""
    shift: torch.Tensor
    """Scalar float32: `variance` summed over heads and columns (CAKE's V). 0 without it."""
    recent: torch.Tensor
    """``[Hq, w]`` float32: sum of the attention to each of the window's own columns."""
    last: torch.Tensor | None
    """``[Hq, tokens]`` float32: attention of the last row to every key. None if not requested."""
    maximum: torch.Tensor | None = None
    """``[Hq, tokens]`` float32: maximum of the attention to each key, ``max_i A[h, i, j]``. None
    unless requested. With `pooled`, past columns take the maximum over the pooled rows."""

    def row(self, index: int) -> "WindowScores":
        """Return one row's scores. Only for a call that scored several rows."""
        variance, last, maximum = self.variance, self.last, self.maximum
        return WindowScores(
            total=self.total[index],
            variance=None if variance is None else variance[index],
            entropy=self.entropy[index],
            shift=self.shift[index],
            recent=self.recent[index],
            last=None if last is None else last[index],
            maximum=None if maximum is None else maximum[index],
        )
