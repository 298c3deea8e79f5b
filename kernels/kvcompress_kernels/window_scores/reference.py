"""Reference for `window_scores` in float64: reduces the window's rows of the attention matrix.

Each row of `window_scores_of_rows` must match it on the row's own tokens.
"""

import torch

from kvcompress_kernels.cached_prompt import attention, cached_keys
from kvcompress_kernels.window_scores.result import WindowScores


def run(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    variance: bool,
    maximum: bool = False,
    pooled: bool = False,
    sinks: torch.Tensor | None = None,
    last: bool = True,
) -> WindowScores:
    past = tokens - len(query)
    a = attention(query, cached_keys(key_pages, pages, tokens), scale, sinks)  # [Hq, w, tokens]
    before, highest = a[:, :, :past], a.amax(1)
    if pooled:
        highest[:, :past] = _pooled(before).amax(1)
    variances = before.var(1).float() if variance else None
    return WindowScores(
        total=before.sum(1).float(),
        variance=variances,
        entropy=-torch.xlogy(before, before).sum().float(),
        shift=a.new_zeros(()).float() if variances is None else variances.sum(),
        recent=a[:, :, past:].sum(1).float(),
        last=a[:, -1].float() if last else None,
        maximum=highest.float() if maximum else None,
    )


def _pooled(rows: torch.Tensor) -> torch.Tensor:
    """Average rows over five columns, with zeros outside, and rescale them to their old sums."""
    pooled = torch.nn.functional.pad(rows, (2, 2)).unfold(-1, 5, 1).sum(-1) / 5
    total = pooled.sum(-1, keepdim=True)
    return pooled * rows.sum(-1, keepdim=True) / total.where(total > 0, 1.0)
