"""Reference for `select` and `select_chunks`: sorts one row at a time in Python."""

import math
from collections.abc import Sequence

import torch


def run(
    scores: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor,
    max_kept: int,
    num_first: torch.Tensor,
    num_last: torch.Tensor,
) -> torch.Tensor:
    kept = []
    limits = zip(*(x.tolist() for x in (columns, keep, num_first, num_last)), strict=True)
    for row, (n, count, head, tail) in zip(scores.tolist(), limits, strict=True):
        count = max(min(count, n, max_kept), 0)
        head = min(max(head, 0), count)
        tail = min(max(tail, 0), count - head)
        best = ranked(row[head : n - tail])[: count - head - tail]
        kept.append([*range(head), *(head + j for j in best), *range(n - tail, n)])
    return _positions(kept, max_kept, scores.device)


def chunks(
    scores: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor,
    max_kept: int,
    size: int,
    heads: int,
) -> torch.Tensor:
    kept = []
    groups = scores.double().view(len(scores) // heads, heads, scores.shape[1]).sum(1).tolist()
    for token, n, count in zip(groups, columns.tolist(), keep.tolist(), strict=True):
        parts = [range(start, min(start + size, n)) for start in range(0, n, size)]
        means = [sum(token[j] for j in part) / len(part) for part in parts]
        best = [j for part in ranked(means) for j in parts[part]]
        kept.append(best[: max(min(count, max_kept), 0)])
    return _positions(kept, max_kept, scores.device)


def ranked(row: Sequence[float]) -> list[int]:
    """Return the positions of a row by descending score. Ties keep their order. NaN equals -inf."""
    return sorted(range(len(row)), key=lambda j: (math.inf if math.isnan(row[j]) else -row[j], j))


def _positions(kept: list[list[int]], max_kept: int, device: torch.device) -> torch.Tensor:
    """Return the positions ``[R, max_kept]`` int32 in ascending order, padded with -1."""
    rows = [sorted(row) + [-1] * (max_kept - len(row)) for row in kept]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(len(kept), max_kept)
