"""CPU form of `select` and `select_chunks`: how much is kept stays on the device."""

import torch


def run(
    scores: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor,
    most: int,
    first: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    columns, count = columns[:, None], _count(columns, keep, most)
    rows, width = scores.shape
    if not rows * width * most:
        return torch.full((rows, most), -1, dtype=torch.int32, device=scores.device)
    column = torch.arange(width, dtype=torch.int32, device=scores.device)
    head = first[:, None].clamp(min=0).minimum(count)
    tail = last[:, None].clamp(min=0).minimum(count - head)
    room = count - head - tail
    free = (column >= head) & (column < columns - tail)
    scores = scores.where(free & ~scores.isnan(), -torch.inf)
    best = scores.topk(min(most, width), dim=1).values
    boundary = best.gather(1, (room - 1).clamp(min=0).long())
    above, level = scores > boundary, free & (scores == boundary)
    ties = level & (level.cumsum(1, dtype=torch.int32) <= room - above.sum(1, keepdim=True))
    return _positions(above | ties | ((column < columns) & ~free), most)


def chunks(
    scores: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor,
    most: int,
    size: int,
    heads: int,
) -> torch.Tensor:
    columns, count = columns[:, None], _count(columns, keep, most)
    rows, width = scores.shape
    column = torch.arange(width, device=scores.device)
    token = scores.view(rows // heads, heads, width).sum(1, dtype=torch.float64)
    token = _plain(token).where(column < columns, 0.0)
    number = -(-width // size)
    token = torch.nn.functional.pad(token, (0, number * size - width))
    start = torch.arange(number, device=scores.device) * size
    length = (columns - start).clamp(0, size)
    mean = _plain(token.view(len(token), number, size).sum(-1) / length.clamp(min=1))
    order = mean.where(length > 0, -torch.inf).sort(dim=1, stable=True, descending=True).indices
    ranked = length.gather(1, order)
    room = (count - ranked.cumsum(1) + ranked).clamp(min=0)
    share = torch.empty_like(ranked).scatter_(1, order, ranked.minimum(room))
    return _positions(column % size < share[:, column // size], most)


def _count(columns: torch.Tensor, keep: torch.Tensor, most: int) -> torch.Tensor:
    """How many positions each row gives, ``[R, 1]``."""
    return keep.minimum(columns).clamp(0, most)[:, None]


def _plain(scores: torch.Tensor) -> torch.Tensor:
    """NaN as -inf and -0.0 as 0.0, which a sort by bits would tell apart."""
    return scores.where(~scores.isnan(), -torch.inf).where(scores != 0, 0.0)


def _positions(kept: torch.Tensor, most: int) -> torch.Tensor:
    """``[R, W]`` bool with at most `most` set in each row to ``[R, most]`` int32."""
    out = torch.full((len(kept), most + 1), -1, dtype=torch.int32, device=kept.device)
    # AttentionStats that are not kept all write to one further slot, which is cut off at the end.
    slot = (kept.cumsum(1) - 1).where(kept, most)
    column = torch.arange(kept.shape[1], dtype=torch.int32, device=kept.device)
    return out.scatter_(1, slot, column.expand_as(kept))[:, :most].contiguous()
