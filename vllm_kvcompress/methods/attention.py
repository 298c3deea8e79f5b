"""What an observation window thinks of rows that differ in length, or in two parts."""

import torch
from torch.nn.functional import pad

from kvcompress_kernels.window_scores import WindowScores, window_scores_of_rows
from vllm_kvcompress.methods.paged_layers import PagedLayers


def apart(rows: PagedLayers, query: torch.Tensor, latest: int) -> WindowScores:
    """What the `latest` queries think of the tokens before them, and the others' maximum.

    The others see what stood there when they were computed, which the latest ones follow.
    """
    tokens, block_size = rows.most - latest, rows.key_pages.shape[3]
    others = window_scores_of_rows(
        query[:, :-latest],
        rows.key_pages,
        rows.pages[:, : -(-tokens // block_size)],
        tokens,
        rows.scale,
        lengths=None if rows.lengths is None else rows.lengths - latest,
        variance=False,
        maximum=True,
        sinks=rows.sinks,
    ).maximum  # all else that they leave is free again before the latest ones are scored
    assert others is not None
    maximum = pad(others, (0, latest))
    del others
    found = window_scores_of_rows(
        query[:, -latest:],
        rows.key_pages,
        rows.pages,
        rows.most,
        rows.scale,
        lengths=rows.lengths,
        variance=True,
        sinks=rows.sinks,
    )
    return found._replace(maximum=maximum)


def cut(part: torch.Tensor | None, past: int) -> torch.Tensor | None:
    return None if part is None else part[:, :past]


def past_of(part: torch.Tensor, rows: PagedLayers, window: int) -> torch.Tensor:
    """``[N, Hq, most - w]``: what stands in the window's own columns is 0, as behind a past."""
    assert rows.lengths is not None
    column = torch.arange(rows.most - window, device=part.device)
    own = part[..., : rows.most - window]
    return own.where((column < (rows.lengths - window)[:, None])[:, None], 0)


def window_last(maximum: torch.Tensor, lengths: torch.Tensor, window: int) -> torch.Tensor:
    """``[N, Hq, most]`` with the window's own columns last, and 0 between a past and them.

    Behind a shorter row's past stand its window's own, which pooling must not reach.
    """
    most, past = maximum.shape[2], (lengths - window)[:, None]
    column = torch.arange(most, device=maximum.device)
    at = (past + column[:window]).long().clamp(min=0)[:, None].expand(-1, maximum.shape[1], -1)
    own = maximum.gather(2, at)
    maximum = maximum.masked_fill((column >= past)[:, None], 0)
    maximum[..., most - window :] = own
    return maximum
