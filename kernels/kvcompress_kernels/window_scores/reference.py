"""Definition of `window_scores`, in float64: the window's rows of the attention matrix, reduced.

A row of `window_scores_of_rows`, or a layer of `window_scores_of_layers`, gets this of its own
tokens.
"""

import torch

from kvcompress_kernels.prompt import attention, cached_keys
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
) -> WindowScores:
    past = tokens - len(query)
    a = attention(query, cached_keys(key_pages, pages, tokens), scale, sinks)  # [Hq, w, tokens]
    before, most = a[:, :, :past], a.amax(1)
    if pooled:
        most[:, :past] = _pooled(before).amax(1)
    spread = before.var(1).float() if variance else None
    return WindowScores(
        total=before.sum(1).float(),
        variance=spread,
        entropy=-torch.xlogy(before, before).sum().float(),
        shift=a.new_zeros(()).float() if spread is None else spread.sum(),
        recent=a[:, :, past:].sum(1).float(),
        last=a[:, -1].float(),
        maximum=most.float() if maximum else None,
    )


def _pooled(rows: torch.Tensor) -> torch.Tensor:
    """Rows averaged over five columns, zeros outside, and scaled to the sums that they had."""
    near = torch.nn.functional.pad(rows, (2, 2)).unfold(-1, 5, 1).sum(-1) / 5
    total = near.sum(-1, keepdim=True)
    return near * rows.sum(-1, keepdim=True) / total.where(total > 0, 1.0)
