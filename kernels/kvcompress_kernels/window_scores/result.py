"""Which results `window_scores_of_rows` returns, and their type."""

from typing import NamedTuple

import torch


class Outputs(NamedTuple):
    """Which statistics `window_scores_of_rows` returns. Fields are its arguments of these names."""

    variance: bool
    maximum: bool = False
    pooled: bool = False
    last: bool = True
    grouped: bool = False


class WindowScores(NamedTuple):
    """Attention A of a prompt's last w queries, reduced over these w rows.

    The past is the P = tokens - w columns before the window. Every field of a call's result has a
    leading axis for its rows. A `grouped` call returns ``Hkv`` instead of ``Hq`` lines: each is the
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
