"""Definition of `select` and `select_chunks`: each row is sorted by itself, in Python."""

import math
from collections.abc import Sequence

import torch


def run(
    scores: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor,
    most: int,
    first: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    kept = []
    limits = zip(*(x.tolist() for x in (columns, keep, first, last)), strict=True)
    for row, (n, count, head, tail) in zip(scores.tolist(), limits, strict=True):
        count = max(min(count, n, most), 0)
        head = min(max(head, 0), count)
        tail = min(max(tail, 0), count - head)
        best = ranked(row[head : n - tail])[: count - head - tail]
        kept.append([*range(head), *(head + j for j in best), *range(n - tail, n)])
    return _positions(kept, most, scores.device)


def chunks(
    scores: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor,
    most: int,
    size: int,
    heads: int,
) -> torch.Tensor:
    kept = []
    groups = scores.double().view(len(scores) // heads, heads, scores.shape[1]).sum(1).tolist()
    for token, n, count in zip(groups, columns.tolist(), keep.tolist(), strict=True):
        parts = [range(start, min(start + size, n)) for start in range(0, n, size)]
        means = [sum(token[j] for j in part) / len(part) for part in parts]
        best = [j for part in ranked(means) for j in parts[part]]
        kept.append(best[: max(min(count, most), 0)])
    return _positions(kept, most, scores.device)


def ranked(row: Sequence[float]) -> list[int]:
    """Positions of a row: the best first, equal ones in order; NaN is level with -inf."""
    return sorted(range(len(row)), key=lambda j: (math.inf if math.isnan(row[j]) else -row[j], j))


def _positions(kept: list[list[int]], most: int, device: torch.device) -> torch.Tensor:
    """Positions ``[R, most]`` int32 in ascending order, with -1 behind the last one of a row."""
    rows = [sorted(row) + [-1] * (most - len(row)) for row in kept]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(len(kept), most)
