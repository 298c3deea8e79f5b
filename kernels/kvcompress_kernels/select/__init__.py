"""Public ops from scores to positions, on the device of the scores.

Row r ranks its first ``columns[r]`` scores, higher ones first, then lower positions; NaN ranks
last, level with -inf, and -0.0 is level with 0.0. How much a row keeps is read from the device:
the host names only an upper bound, `most`, and waits for nothing. Positions come out ascending,
with -1 behind the last one of their row.
"""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import require


def select(
    scores: torch.Tensor,
    columns: int | torch.Tensor,
    keep: torch.Tensor,
    most: int,
    *,
    first: int | torch.Tensor = 0,
    last: int | torch.Tensor = 0,
) -> torch.Tensor:
    """The best positions of each row, exact ties included (docs/methods.md 1.6).

    Row r gives ``n = min(keep[r], columns[r], most)`` positions (none if that is negative): its
    first ``f = min(first, n)``, its last ``min(last, n - f)``, whatever their scores, and the best
    of the others (D2O's sinks, recents and heavy hitters, docs/methods.md 6).

    Args:
        scores: ``[R, W]`` float32, rows of stride 1; what they hold from ``columns[r]`` on does
            not matter. Where W and the stride of the rows are multiples of 16, a GPU loads four
            scores at once.
        columns: 0 to W, for all rows or as ``[R]`` int32; unchecked.
        keep: ``[R]`` int32.
        most: width of the result.
        first: leading columns that are kept in any case, for all rows or as ``[R]`` int32.
        last: trailing ones likewise.

    Returns:
        ``[R, most]`` int32.

    Raises:
        ValueError: shapes or dtypes disagree, or `most` is negative.
    """
    name = "select"
    rows = _check(name, scores, most)
    arguments = {"columns": columns, "keep": keep, "first": first, "last": last}
    per_row = [
        _per_row(name, argument, x, rows, scores.device) for argument, x in arguments.items()
    ]
    if contract.triton_takes(scores):
        from kvcompress_kernels.select.triton import run
    else:
        from kvcompress_kernels.select.cpu import run

    columns, keep, ahead, behind = per_row
    return run(scores, columns, keep, most, ahead, behind)


def select_chunks(
    scores: torch.Tensor,
    columns: int | torch.Tensor,
    keep: torch.Tensor,
    most: int,
    *,
    size: int,
    heads: int = 1,
) -> torch.Tensor:
    """Runs of `size` tokens, the best ones of each group of rows (ChunkKV, docs/methods.md 5).

    Scores are summed over the `heads` consecutive rows of a group. A chunk is worth the mean of
    its tokens, the last and shorter one too, in float64, so that equal chunks tie; ties go to the
    earlier one. The chunk that does not fit gives its first tokens: exactly
    ``min(keep[g], columns[g], most)`` positions come out.

    Args:
        scores: ``[G * heads, W]`` float32, rows of stride 1.
        columns: 0 to W, for all groups or as ``[G]`` int32; unchecked.
        keep: ``[G]`` int32.
        most: width of the result.
        size: tokens in a chunk.
        heads: rows that share one ranking: the KV heads of a layer, or 1.

    Returns:
        ``[G, most]`` int32.

    Raises:
        ValueError: shapes or dtypes disagree, `most` is negative, or `size` is not positive.
    """
    name = "select_chunks"
    rows = _check(name, scores, most)
    require(size > 0, name, "size must be positive", size)
    require(heads > 0 and rows % heads == 0, name, f"heads must divide {rows} rows", heads)
    columns = _per_row(name, "columns", columns, rows // heads, scores.device)
    keep = _per_row(name, "keep", keep, rows // heads, scores.device)
    if contract.triton_takes(scores):
        from kvcompress_kernels.select.triton import chunks
    else:
        from kvcompress_kernels.select.cpu import chunks

    return chunks(scores, columns, keep, most, size, heads)


def _check(op: str, scores: torch.Tensor, most: int) -> int:
    require(scores.dim() == 2, op, "scores must be [R, W]", tuple(scores.shape))
    require(scores.dtype == torch.float32, op, "scores must be float32", scores.dtype)
    rows, width = scores.shape
    dense = width < 2 or scores.stride(1) == 1
    require(dense, op, "rows of scores must have stride 1", scores.stride())
    require(most >= 0, op, "most must not be negative", most)
    return rows


def _per_row(
    op: str, name: str, x: int | torch.Tensor, rows: int, device: torch.device
) -> torch.Tensor:
    if isinstance(x, int):
        return torch.full((rows,), x, dtype=torch.int32, device=device)
    require(x.shape == (rows,), op, f"{name} must be [{rows}]", tuple(x.shape))
    require(x.dtype == torch.int32, op, f"{name} must be int32", x.dtype)
    return x.contiguous()
