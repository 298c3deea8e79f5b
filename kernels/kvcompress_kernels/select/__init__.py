"""Positions of the best scores of each row.

Row r ranks its first ``columns[r]`` scores in descending order. Ties go to the lower position.
NaN equals -inf, and -0.0 equals 0.0. The number of kept positions is read on the device: the host
passes only an upper bound, `max_kept`, and never syncs. Positions are in ascending order, padded
with -1.
"""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import require


def select(
    scores: torch.Tensor,
    columns: int | torch.Tensor,
    keep: torch.Tensor,
    max_kept: int,
    *,
    num_first: int | torch.Tensor = 0,
    num_last: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Return the positions of the best scores of each row (docs/methods.md 1.6).

    Row r returns ``n = max(min(keep[r], columns[r], max_kept), 0)`` positions: its first
    ``f = min(num_first, n)`` columns and its last ``min(num_last, n - f)`` columns whatever their
    scores, then the best of the columns between them. D2O uses this for its sinks, recent tokens
    and heavy hitters (docs/methods.md 6).

    Args:
        scores: ``[R, W]`` float32, rows of stride 1. Scores from ``columns[r]`` on are ignored. If
            W and the row stride are multiples of 16, a GPU loads four scores at once.
        columns: number of columns to rank, 0 to W: one int, or ``[R]`` int32 (unchecked).
        keep: ``[R]`` int32, number of positions to keep.
        max_kept: width of the result.
        num_first: leading columns that are always kept: one int, or ``[R]`` int32.
        num_last: trailing columns that are always kept: one int, or ``[R]`` int32.

    Returns:
        ``[R, max_kept]`` int32.

    Raises:
        ValueError: Shapes or dtypes disagree, or `max_kept` is negative.
    """
    name = "select"
    rows = _check(name, scores, max_kept)
    arguments = {"columns": columns, "keep": keep, "num_first": num_first, "num_last": num_last}
    per_row = [
        _per_row(name, argument, x, rows, scores.device) for argument, x in arguments.items()
    ]
    if contract.runs_triton(scores):
        from kvcompress_kernels.select.triton import run
    else:
        from kvcompress_kernels.select.cpu import run

    columns, keep, leading, trailing = per_row
    return run(scores, columns, keep, max_kept, leading, trailing)


def select_chunks(
    scores: torch.Tensor,
    columns: int | torch.Tensor,
    keep: torch.Tensor,
    max_kept: int,
    *,
    size: int,
    heads: int = 1,
) -> torch.Tensor:
    """Return the positions of the best chunks of each group of rows (ChunkKV, docs/methods.md 5).

    A chunk is `size` consecutive tokens. Token scores are summed over the `heads` consecutive rows
    of a group. The score of a chunk is the mean over its tokens, also for a shorter last chunk, in
    float64, so that equal chunks tie. Ties go to the earlier chunk. The first chunk that exceeds
    the budget is cut: each group returns exactly ``min(keep[g], columns[g], max_kept)`` positions.

    Args:
        scores: ``[G * heads, W]`` float32, rows of stride 1.
        columns: number of columns to rank, 0 to W: one int, or ``[G]`` int32 (unchecked).
        keep: ``[G]`` int32, number of positions to keep.
        max_kept: width of the result.
        size: tokens in a chunk.
        heads: rows that share one ranking: the KV heads of a layer, or 1.

    Returns:
        ``[G, max_kept]`` int32.

    Raises:
        ValueError: Shapes or dtypes disagree, `max_kept` is negative, or `size` is not positive.
    """
    name = "select_chunks"
    rows = _check(name, scores, max_kept)
    require(size > 0, name, "size must be positive", size)
    require(heads > 0 and rows % heads == 0, name, f"heads must divide {rows} rows", heads)
    columns = _per_row(name, "columns", columns, rows // heads, scores.device)
    keep = _per_row(name, "keep", keep, rows // heads, scores.device)
    if contract.runs_triton(scores):
        from kvcompress_kernels.select.triton import chunks
    else:
        from kvcompress_kernels.select.cpu import chunks

    return chunks(scores, columns, keep, max_kept, size, heads)


def _check(op: str, scores: torch.Tensor, max_kept: int) -> int:
    require(scores.dim() == 2, op, "scores must be [R, W]", tuple(scores.shape))
    require(scores.dtype == torch.float32, op, "scores must be float32", scores.dtype)
    rows, width = scores.shape
    dense = width < 2 or scores.stride(1) == 1
    require(dense, op, "rows of scores must have stride 1", scores.stride())
    require(max_kept >= 0, op, "max_kept must not be negative", max_kept)
    return rows


def _per_row(
    op: str, name: str, x: int | torch.Tensor, rows: int, device: torch.device
) -> torch.Tensor:
    if isinstance(x, int):
        return torch.full((rows,), x, dtype=torch.int32, device=device)
    require(x.shape == (rows,), op, f"{name} must be [{rows}]", tuple(x.shape))
    require(x.dtype == torch.int32, op, f"{name} must be int32", x.dtype)
    return x.contiguous()
