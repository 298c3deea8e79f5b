"""Torch code of `select` and `select_chunks` for a CPU. It reads no tensor values on the host."""

import torch


def run(
    scores: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor,
    max_kept: int,
    num_first: torch.Tensor,
    num_last: torch.Tensor,
) -> torch.Tensor:
    columns, count = columns[:, None], _count(columns, keep, max_kept)
    rows, width = scores.shape
    if not rows * width * max_kept:
        return torch.full((rows, max_kept), -1, dtype=torch.int32, device=scores.device)
    column = torch.arange(width, dtype=torch.int32, device=scores.device)
    head = num_first[:, None].clamp(min=0).minimum(count)
    tail = num_last[:, None].clamp(min=0).minimum(count - head)
    ranked_count = count - head - tail
    ranked = (column >= head) & (column < columns - tail)
    scores = scores.where(ranked & ~scores.isnan(), -torch.inf)
    best = scores.topk(min(max_kept, width), dim=1).values
    threshold = best.gather(1, (ranked_count - 1).clamp(min=0).long())
    above, equal = scores > threshold, ranked & (scores == threshold)
    num_ties = ranked_count - above.sum(1, keepdim=True)
    ties = equal & (equal.cumsum(1, dtype=torch.int32) <= num_ties)
    return _positions(above | ties | ((column < columns) & ~ranked), max_kept)


def chunks(
    scores: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor,
    max_kept: int,
    size: int,
    heads: int,
) -> torch.Tensor:
    columns, count = columns[:, None], _count(columns, keep, max_kept)
    rows, width = scores.shape
    column = torch.arange(width, device=scores.device)
    token = scores.view(rows // heads, heads, width).sum(1, dtype=torch.float64)
    token = _plain(token).where(column < columns, 0.0)
    num_chunks = -(-width // size)
    token = torch.nn.functional.pad(token, (0, num_chunks * size - width))
    start = torch.arange(num_chunks, device=scores.device) * size
    length = (columns - start).clamp(0, size)
    mean = _plain(token.view(len(token), num_chunks, size).sum(-1) / length.clamp(min=1))
    order = mean.where(length > 0, -torch.inf).sort(dim=1, stable=True, descending=True).indices
    ranked = length.gather(1, order)
    left = (count - ranked.cumsum(1) + ranked).clamp(min=0)
    kept_per_chunk = torch.empty_like(ranked).scatter_(1, order, ranked.minimum(left))
    return _positions(column % size < kept_per_chunk[:, column // size], max_kept)


def _count(columns: torch.Tensor, keep: torch.Tensor, max_kept: int) -> torch.Tensor:
    """Return the number of positions that each row returns, ``[R, 1]``."""
    return keep.minimum(columns).clamp(0, max_kept)[:, None]


def _plain(scores: torch.Tensor) -> torch.Tensor:
    """Replace NaN by -inf and -0.0 by 0.0, because torch sorts the float's bits."""
    return scores.where(~scores.isnan(), -torch.inf).where(scores != 0, 0.0)


def _positions(kept: torch.Tensor, max_kept: int) -> torch.Tensor:
    """Convert a mask ``[R, W]`` to positions ``[R, max_kept]`` int32, padded with -1.

    Each row of the mask must have at most `max_kept` columns set.
    """
    out = torch.full((len(kept), max_kept + 1), -1, dtype=torch.int32, device=kept.device)
    # Columns that are not kept write to one extra slot, which the last line drops.
    slot = (kept.cumsum(1) - 1).where(kept, max_kept)
    column = torch.arange(kept.shape[1], dtype=torch.int32, device=kept.device)
    return out.scatter_(1, slot, column.expand_as(kept))[:, :max_kept].contiguous()
