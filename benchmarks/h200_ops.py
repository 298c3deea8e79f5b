"""Every kernel: all rows in one call, one row by the public op and by the torch reference, and the
least work that any implementation must do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from h200_problem import Problem, Shape, attended, compared, moved, once, ranked, tabled
from h200_truths import (
    CHUNK,
    PER_HEAD,
    Outputs,
    chunks_truth,
    column_query,
    column_truth,
    compact_truth,
    merge_truth,
    select_truth,
    tables_truth,
    value_truth,
    window_truth,
)

from kvcompress_kernels.column_sums import column_sums
from kvcompress_kernels.merge_evicted import merge_evicted
from kvcompress_kernels.move_kept import move_kept
from kvcompress_kernels.page_tables import page_tables
from kvcompress_kernels.select import select, select_chunks
from kvcompress_kernels.value_scores import value_scores
from kvcompress_kernels.window_scores import window_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel at work.

    Args:
        launch: all rows; outputs ``[N, ...]``.
        truth: one row in float64, from the formula; outputs without the first axis.
        alone: one row by the public op, which on CUDA is Triton; must equal `launch` bit for bit.
        plain: one row by the torch reference.
        blank: what outputs hold behind a shorter prompt; None where they hold anything.
        left: what `launch` left in the pool, where that is its output.
        rows: rows of the outputs that `truth` and `alone` count by.
        floor_bytes: bytes that must move, as in "K once"; 0 if arithmetic is the floor.
        floor_flops: operations that must be done on the tensor cores.
        passes: how often the kernel reads its main input by design.
        goal: least share of the copy bandwidth, by the floor.
    """

    name: str
    launch: Callable[[Problem], Outputs]
    truth: Callable[[Problem, int], Outputs]
    alone: Callable[[Problem, int], Outputs]
    plain: Callable[[Problem, int], Any] | None = None
    blank: float | None = None
    left: Callable[[Problem], Outputs] | None = None
    rows: Callable[[Shape], int] = lambda shape: shape.rows
    floor_bytes: Callable[[Shape], int] = lambda shape: 0
    floor_flops: Callable[[Shape], int] = lambda shape: 0
    passes: int = 1
    goal: float | None = None


# -- window_scores -----------------------------------------------------------------------------


def window_all_rows(p: Problem, **wanted: bool) -> Outputs:
    from kvcompress_kernels.window_scores.triton import run_batch

    seen = run_batch(p.query, p.keys, p.pages, p.tokens, p.lengths, p.scale, **wanted)
    return {name: x for name, x in seen._asdict().items() if x is not None}


def window_args(p: Problem, row: int) -> tuple[Any, ...]:
    return p.query[row], p.keys, p.prompt_pages(row), p.tokens[row], p.scale


def window_alone(p: Problem, row: int) -> Outputs:
    """Entropy and shift are sums over a batch's columns: their order is not promised."""
    seen = window_scores(*window_args(p, row), variance=True)._asdict()
    return {name: seen[name] for name in PER_HEAD}


def window_plain(p: Problem, row: int, *, variance: bool) -> Any:
    from kvcompress_kernels.window_scores.reference import run

    return run(*window_args(p, row), variance)


# -- value_scores ------------------------------------------------------------------------------


def value_all_rows(p: Problem, *, fast: bool, reduce: str) -> Outputs:
    from kvcompress_kernels.value_scores.triton import run_batch

    return {"scores": run_batch(p.weights, p.values, p.pages, p.lengths, fast, reduce)}


def value_args(p: Problem, row: int) -> tuple[Any, ...]:
    tokens = p.tokens[row]
    return p.weights[row, :, :tokens].contiguous(), p.values, p.prompt_pages(row), tokens


def value_alone(p: Problem, row: int, *, fast: bool, reduce: str) -> Outputs:
    return {"scores": value_scores(*value_args(p, row), fast=fast, reduce=reduce)}


def value_plain(p: Problem, row: int, *, fast: bool, reduce: str) -> Any:
    from kvcompress_kernels.value_scores.reference import run

    return run(*value_args(p, row), fast, reduce)


# -- column_sums -------------------------------------------------------------------------------


def column_all_rows(p: Problem) -> Outputs:
    from kvcompress_kernels.column_sums.triton import run_batch

    most, longest = max(p.chunks), max(p.tokens)
    where = p.keys, p.pages, p.lengths, longest, p.scale
    return {"sums": run_batch(p.chunk_query, p.starts, most, *where)}


def column_args(p: Problem, row: int) -> tuple[Any, ...]:
    return column_query(p, row), p.keys, p.prompt_pages(row), p.tokens[row], p.scale


def column_plain(p: Problem, row: int) -> Any:
    from kvcompress_kernels.column_sums.reference import run

    return run(*column_args(p, row))


# -- compact -----------------------------------------------------------------------------------


def compact_all_rows(p: Problem) -> Outputs:
    move_kept(p.keys, p.values, p.pages, p.kept, p.counts, p.destination)
    return {}


def in_destinations(p: Problem) -> Outputs:
    return {"keys": p.keys[p.destination], "values": p.values[p.destination]}


def packed(p: Problem, rows: slice) -> Outputs:
    pages, kept, counts = p.pages[rows], p.kept[rows], p.counts[rows]
    most = kept.shape[2] // p.shape.block
    where = torch.arange(len(pages) * most, device=kept.device).view(len(pages), most)
    keys, values = (
        x.new_empty(where.numel(), x.shape[1], p.shape.block, dim)
        for x, dim in ((p.keys, p.keys.shape[2]), (p.values, p.values.shape[3]))
    )
    move_kept(p.keys, p.values, pages, kept, counts, where, into=(keys.mT, values))
    return {"keys": keys.mT.unflatten(0, where.shape), "values": values.unflatten(0, where.shape)}


def packed_alone(p: Problem, row: int) -> Outputs:
    count = p.shape.pages_of(p.tokens[row])
    return {name: x[0, :count] for name, x in packed(p, slice(row, row + 1)).items()}


def compact_plain(p: Problem, row: int) -> Any:
    from kvcompress_kernels.move_kept.reference import run

    what = (x[row : row + 1] for x in (p.pages, p.kept, p.counts, p.destination))
    return run(p.keys, p.values, *what, p.keys, p.values)


# -- merge_evicted -----------------------------------------------------------------------------


def merge_all_rows(p: Problem) -> Outputs:
    from kvcompress_kernels.merge_evicted.triton import run_batch

    pages = (p.shape.pages_of(tokens) for tokens in p.tokens)
    evicted = max(t - n * p.shape.block for t, n in zip(p.tokens, pages, strict=True))
    kept = p.counts * p.shape.block
    keys, values = run_batch(p.keys, p.values, p.pages, p.lengths, p.kept, kept, evicted)
    return {"keys": keys, "values": values}


def merge_args(p: Problem, row: int) -> tuple[Any, ...]:
    kept = p.kept_of(row)[None]
    counts = p.counts[row : row + 1] * p.shape.block
    pages = p.prompt_pages(row)[None]
    return p.keys, p.values, pages, p.tokens[row], kept, counts, kept.shape[2]


def merge_alone(p: Problem, row: int) -> Outputs:
    keys, values = merge_evicted(*merge_args(p, row))
    return {"keys": keys[0], "values": values[0]}


def merge_plain(p: Problem, row: int) -> Any:
    from kvcompress_kernels.merge_evicted.reference import run

    return run(*merge_args(p, row))


# -- select ------------------------------------------------------------------------------------


def select_all_rows(p: Problem) -> Outputs:
    most = p.shape.kept_pages * p.shape.block
    return {"positions": select(p.scores, p.columns, p.keep, most)}


def select_alone(p: Problem, row: int) -> Outputs:
    part, most = slice(row, row + 1), p.shape.kept_pages * p.shape.block
    got = select(p.scores[part], p.columns[part], p.keep[part], most)
    return {"positions": got[0]}


def select_plain(p: Problem, row: int) -> Any:
    from kvcompress_kernels.select.reference import run

    heads, most = p.shape.kv_heads, p.shape.kept_pages * p.shape.block
    part = slice(row * heads, (row + 1) * heads)
    none = torch.zeros_like(p.keep[part])
    return run(p.scores[part], p.columns[part], p.keep[part], most, none, none)


def chunks_all_rows(p: Problem) -> Outputs:
    most, heads = p.shape.kept_pages * p.shape.block, p.shape.kv_heads
    what = p.scores, p.lengths, p.counts * p.shape.block, most
    return {"positions": select_chunks(*what, size=CHUNK, heads=heads)}


def chunks_alone(p: Problem, row: int) -> Outputs:
    most, heads = p.shape.kept_pages * p.shape.block, p.shape.kv_heads
    scores, one = p.scores[row * heads : (row + 1) * heads], slice(row, row + 1)
    what = scores, p.lengths[one], p.counts[one] * p.shape.block, most
    return {"positions": select_chunks(*what, size=CHUNK, heads=heads)[0]}


# -- page_tables -------------------------------------------------------------------------------


def tables_all_rows(p: Problem) -> Outputs:
    """Outputs ``[R, L, ...]``: a row is a request."""
    from kvcompress_kernels.page_tables.triton import run_into

    run_into(*p.tables)
    out = p.tables.out_tables, p.tables.out_lengths
    return {"tables": out[0].transpose(0, 1), "lengths": out[1].T}


def tables_alone(p: Problem, row: int) -> Outputs:
    return {"lengths": page_tables(*p.tables[:8])[1][:, row]}


def tables_plain(p: Problem, row: int) -> Any:
    from kvcompress_kernels.page_tables.reference import run

    return run(*p.tables[:8])


# -- the list ----------------------------------------------------------------------------------

_TWICE: dict[str, Any] = {"floor_bytes": once, "passes": 2, "goal": 0.8, "blank": 0.0}
_CAKE = {"grouped": True, "variance": True, "entropy": True, "shift": True}
_ALL = dict.fromkeys(("variance", "entropy", "shift", "recent", "last"), True)
_MEAN: dict[str, Any] = {"fast": False, "reduce": "mean"}
_FAST: dict[str, Any] = {"fast": True, "reduce": "l2"}
_grouped, _each = (partial(window_truth, grouped=grouped) for grouped in (True, False))


def _nothing(p: Problem, row: int) -> Outputs:
    return {}  # as another one of the list


OPS = (
    Op(
        name="window_scores",
        launch=partial(window_all_rows, grouped=True),
        truth=_grouped,
        alone=_nothing,
        plain=partial(window_plain, variance=False),
        **_TWICE,
    ),
    Op(
        name="window_scores cake",
        launch=partial(window_all_rows, **_CAKE),
        truth=_grouped,
        alone=_nothing,
        plain=partial(window_plain, variance=True),
        **_TWICE,
    ),
    Op(
        name="window_scores all",
        launch=partial(window_all_rows, **_ALL),
        truth=_each,
        alone=window_alone,
        **_TWICE,
    ),
    Op(
        name="value_scores",
        launch=partial(value_all_rows, **_MEAN),
        truth=partial(value_truth, **_MEAN),
        alone=partial(value_alone, **_MEAN),
        plain=partial(value_plain, **_MEAN),
        **_TWICE,
    ),
    Op(
        name="value_scores fast",
        launch=partial(value_all_rows, **_FAST),
        truth=partial(value_truth, **_FAST),
        alone=partial(value_alone, **_FAST),
        plain=partial(value_plain, **_FAST),
        **_TWICE,
    ),
    Op(
        name="compact",
        launch=compact_all_rows,
        truth=compact_truth,
        alone=_nothing,
        plain=compact_plain,
        left=in_destinations,
        floor_bytes=moved,
        goal=0.8,
    ),
    Op(
        name="gather",
        launch=partial(packed, rows=slice(None)),
        truth=compact_truth,
        alone=packed_alone,
        floor_bytes=moved,
    ),
    Op(
        name="select",
        launch=select_all_rows,
        truth=select_truth,
        alone=select_alone,
        plain=select_plain,
        rows=lambda shape: shape.rows * shape.kv_heads,
        blank=-1,
        floor_bytes=ranked,
    ),
    Op(
        name="select_chunks",
        launch=chunks_all_rows,
        truth=chunks_truth,
        alone=chunks_alone,
        blank=-1,
        floor_bytes=ranked,
    ),
    Op(
        name="page_tables",
        launch=tables_all_rows,
        truth=tables_truth,
        alone=tables_alone,
        plain=tables_plain,
        rows=lambda shape: shape.requests,
        floor_bytes=tabled,
    ),
    Op(
        name="column_sums",
        launch=column_all_rows,
        truth=column_truth,
        alone=lambda p, row: {"sums": column_sums(*column_args(p, row))},
        plain=column_plain,
        blank=0.0,
        floor_flops=attended,
    ),
    Op(
        name="merge_evicted",
        launch=merge_all_rows,
        truth=merge_truth,
        alone=merge_alone,
        plain=merge_plain,
        blank=0.0,
        floor_flops=compared,
    ),
)
