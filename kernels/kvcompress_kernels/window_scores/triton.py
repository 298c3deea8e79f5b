"""Launches the passes of `window_scores`: for one prompt, or every layer and request of a step."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import triton

from kvcompress_kernels.builds import DIMS, FLOATS, Build, architecture, check_cache, float8, named
from kvcompress_kernels.contract import require
from kvcompress_kernels.window_scores.result import WindowScores
from kvcompress_kernels.window_scores.triton_passes import (
    columns_kernel,
    log_sum_kernel,
    partials_kernel,
)

SPAN = 1024
"""Columns of a program. Fixed, so that a prompt's scores do not depend on its batch."""
LOG_SUM = {"SPAN": SPAN, "LINES": 32, "SPLITS": 64}


class BatchScores(NamedTuple):
    """`WindowScores` of N prompts; H is Hq, or Hkv if they are grouped.

    Columns that a shorter prompt does not have hold 0.
    """

    total: torch.Tensor
    """``[N, H, longest - w]`` float32."""
    variance: torch.Tensor | None
    """``[N, H, longest - w]`` float32."""
    entropy: torch.Tensor | None
    """``[N]`` float32, over query heads."""
    shift: torch.Tensor | None
    """``[N]`` float32, over query heads."""
    recent: torch.Tensor | None
    """``[N, H, w]`` float32."""
    last: torch.Tensor | None
    """``[N, H, longest]`` float32."""


def run(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    variance: bool,
) -> WindowScores:
    seen = run_batch(
        query[None],
        key_pages,
        pages.contiguous()[None],
        [tokens],
        torch.full((1,), tokens, dtype=torch.int32, device=query.device),
        scale,
        variance=variance,
        entropy=True,
        shift=variance,
        recent=True,
        last=True,
    )
    spread, entropy, shift, recent, last = (x if x is None else x[0] for x in seen[1:])
    assert entropy is not None
    assert recent is not None
    assert last is not None
    shift = torch.zeros_like(entropy) if shift is None else shift
    return WindowScores(seen.total[0], spread, entropy, shift, recent, last)


def run_batch(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: Sequence[int],
    lengths: torch.Tensor,
    scale: float,
    *,
    grouped: bool = False,
    variance: bool = False,
    entropy: bool = False,
    shift: bool = False,
    recent: bool = False,
    last: bool = False,
) -> BatchScores:
    """`window_scores` of N prompts of any lengths, in three launches.

    Only what is asked for is computed and stored. A prompt's `total`, `variance`, `recent` and
    `last` are bit for bit those it gets alone.

    Args:
        query: ``[N, w, Hq, D]`` float16, bfloat16 or float32, rotated, in position order.
        key_pages: ``[pages, Hkv, D, block_size]`` of such a dtype or float8, any strides.
        pages: ``[N, >= ceil(longest / block_size)]`` int: each prompt's pages, in order; of row n
            the first ``ceil(tokens[n] / block_size)`` are read.
        tokens: N prompt lengths, each above w.
        lengths: ``[N]`` int, the same on the device.
        scale: factor on the logits.
        grouped: `total`, `variance`, `recent` and `last` as means over the G query heads of each
            KV head, ``1 / G`` of the memory. Entropy and shift stay sums over query heads.
        variance: return the variance; it and `shift` need ``w >= 2``.
        entropy: return the entropy.
        shift: return the sum of the variance.
        recent: return the attention to the window's own columns.
        last: return the last row.

    Raises:
        ValueError: shapes disagree, a prompt is no longer than the window, a single row is asked
            for its variance, or the kernels do not take a dtype.
    """
    name = "window_scores"
    rows, w, heads, dim = query.shape
    _, kv_heads, key_dim, block = key_pages.shape
    group, size = heads // kv_heads, max(tokens, default=0)
    require(query.dtype in FLOATS, name, f"queries must be one of {list(FLOATS)}", query.dtype)
    check_cache(name, key_pages)
    require(key_dim == dim, name, f"key_pages must have head dim {dim}", key_dim)
    require(heads == group * kv_heads > 0, name, f"Hq must be a multiple of {kv_heads}", heads)
    require(len(tokens) == len(lengths) == rows > 0, name, f"tokens of {rows} rows", tokens)
    require(0 < w < min(tokens), name, f"prompts must be longer than the window, {w}", tokens)
    require(w > 1 or not (variance or shift), name, "a variance needs a window of at least 2", w)
    ok = len(pages) == rows and pages.shape[1] * block >= size and pages.stride(1) == 1
    require(ok, name, f"pages must be dense rows [{rows}, {-(-size // block)}]", pages.shape)

    if scale < 0:  # the kernels take the top of the logits before they scale
        query, scale = -query, -scale
    model = w, group, dim, max(query.itemsize, key_pages.itemsize)
    several = variance or shift or entropy or last
    partials_shapes = _partials_shapes(*model)
    columns_shapes = _columns_shapes(*model, architecture(query.device), several, variance)
    layout = 0 if pages.shape[1] == 1 else block
    splits, lines = triton.cdiv(size, SPAN), heads * w
    strides = (*query.stride(), pages.stride(0), *key_pages.stride())
    factor = scale / math.log(2)

    def new(*shape: int, zero: bool = False) -> torch.Tensor:
        make = torch.zeros if zero else torch.empty
        return make(shape, dtype=torch.float32, device=query.device)

    tops, sums = new(2, rows, splits, lines)
    row_tops, log_sums = new(2, rows, lines)
    tiles = triton.cdiv(group, partials_shapes["HEADS"])
    tiles *= triton.cdiv(w, partials_shapes["WINDOW"])
    partials_kernel[(tiles * splits, kv_heads, rows)](
        *(query, key_pages, pages, lengths, tops, sums, factor, w, group, splits),
        *strides,
        BLOCK=layout,
        **partials_shapes,
    )
    log_sum_kernel[(triton.cdiv(lines, LOG_SUM["LINES"]), rows)](
        tops, sums, lengths, row_tops, log_sums, lines, splits, **LOG_SUM
    )
    tiles = triton.cdiv(group, columns_shapes["HEADS"])
    of, ragged = kv_heads * tiles if grouped else heads, min(tokens) < size
    parts = kv_heads * tiles * splits
    out = {
        "total_out": new(rows, of, size - w, zero=ragged),
        "variance_out": new(rows, of, size - w, zero=ragged) if variance else None,
        "recent_out": new(rows, of, w) if recent else None,
        "last_out": new(rows, of, size, zero=ragged) if last else None,
        "entropies": new(rows, parts, zero=ragged) if entropy else None,
        "shifts": new(rows, parts, zero=ragged) if shift else None,
    }
    columns_kernel[(tiles * splits, kv_heads, rows)](
        *(query, key_pages, pages, lengths, row_tops, log_sums),
        *out.values(),
        *(factor, w, group, size),
        *strides,
        BLOCK=layout,
        GROUPED=grouped,
        **columns_shapes,
    )
    maps = (out[key] for key in ("total_out", "variance_out", "recent_out", "last_out"))
    total, spread, own, final = (
        x.view(rows, kv_heads, tiles, -1).sum(2) if x is not None and grouped and tiles > 1 else x
        for x in maps
    )
    amount, moved = (
        x if x is None else x.sum(1, dtype=torch.float64).float()
        for x in (out["entropies"], out["shifts"])
    )
    assert total is not None
    return BatchScores(total, spread, amount, moved, own, final)


def _shapes(w: int, group: int, dim: int, itemsize: int, least: int, most: int) -> dict[str, int]:
    """The configuration of a program of `least` to `most` rows, launch options included.

    A tile is 64 keys and at most 128 rows: 16 KiB of K in flight and 64 registers a thread of
    logits with 4 warps at D 128, bf16. Float32 is multiplied without tensor cores, out of
    registers, and gets a quarter of the rows.
    """
    most = 32 if itemsize == 4 else most
    window = min(triton.next_power_of_2(w), most)
    heads = min(triton.next_power_of_2(group), most // window)
    heads = max(heads, min(least, most) // window)
    pad = max(16, triton.next_power_of_2(dim))
    return {
        "DIM": dim,
        "PAD": pad,
        "HEADS": heads,
        "WINDOW": window,
        "COLUMNS": 64,
        "SPAN": SPAN,
        "num_warps": 4,
        "num_stages": 3,
    }


def _partials_shapes(w: int, group: int, dim: int, itemsize: int) -> dict[str, int]:
    """64 rows are the fewest that Hopper's tensor cores take, with K straight from shared memory;
    with fewer, K would pass through registers, and narrow loads where it is stored transposed."""
    return _shapes(w, group, dim, itemsize, 64, 128)


def _columns_shapes(
    w: int, group: int, dim: int, itemsize: int, sm: int, maps: bool, variance: bool
) -> dict[str, int]:
    """16 rows are the fewest of `tl.dot`. The most need 8 warps: variance and last row, `maps`,
    keep several maps of a tile alive. With them Blackwell's logits, which come from its tensor
    memory, would spill at 128 rows, and Ampere's without the variance."""
    most = 64 if maps and (sm >= 100 or (sm < 90 and not variance)) else 128
    shapes = _shapes(w, group, dim, itemsize, 16, most)
    many = shapes["HEADS"] * shapes["WINDOW"] == most
    many |= sm >= 100 and maps and w == 1
    return {**shapes, "CHUNKS": triton.cdiv(w, shapes["WINDOW"]), "num_warps": 8 if many else 4}


def builds(sm: int) -> list[Build]:
    """bf16 queries, 8 KV heads in groups of 4, block 16; keys of bf16 or, a few, of float8.

    Keys lie as every CUDA backend of vLLM has them, a token's dims side by side: only the CPU's
    stores them transposed, where no kernel runs.
    """
    found = [
        Build(
            name="window_scores log_sum",
            kernel=log_sum_kernel,
            signature={
                **dict.fromkeys(("tops", "sums", "row_tops", "log_sums"), "*fp32"),
                "lengths": "*i32",
                "lines": "i32",
                "splits": "i32",
            },
            constexprs=LOG_SUM,
            aligned=("tops", "sums", "row_tops", "log_sums", "lengths"),
            wide_loads=False,
        )
    ]
    for of in float8(sm).values():
        found += _builds(128, 32, of, sm)
    for dim, w in [*product(DIMS, (32,)), *product((64, 128), (1, 8, 64, 128))]:
        found += _builds(dim, w, "*bf16", sm)
    return found


def _builds(dim: int, w: int, of: str, sm: int) -> list[Build]:
    strides = [f"s_query_{axis}" for axis in ("row", "token", "head")]
    strides += ["s_pages", "s_page", "s_head", "s_slot"]
    inputs = {"query": "*bf16", "keys": of, "pages": "*i64", "lengths": "*i32"}
    numbers = {"factor": "fp32", **dict.fromkeys(("w", "group", *strides), "i32")}
    aligned = [*inputs, *(x for x in strides if x != "s_pages")]
    outputs = ("total_out", "variance_out", "recent_out", "last_out", "entropies", "shifts")
    few, some, every = (
        _columns_shapes(w, 4, dim, 2, sm, maps, variance)
        for maps, variance in ((False, False), (True, False), (True, True))
    )

    def build(kernel: Any, what: str, pointers: Sequence[str], size: str, how: Any) -> Build:
        constexprs = {"BLOCK": 16, "s_query_dim": 1, "s_dim": 1, **how}
        return Build(
            name=f"window_scores {what} D{dim} w{w}{named(of)}",
            kernel=kernel,
            signature={**inputs, **dict.fromkeys(pointers, "*fp32"), **numbers, size: "i32"},
            warps=constexprs.pop("num_warps"),
            stages=constexprs.pop("num_stages"),
            constexprs=constexprs,
            aligned=(*aligned, *pointers),
            tensor_cores=True,
        )

    totals = {**few, "GROUPED": True, **dict.fromkeys(outputs[1:])}
    plain = ("total_out", "recent_out", "last_out", "entropies")  # what is not CAKE's asks for
    absent = dict.fromkeys(set(outputs) - set(plain))
    return [
        build(
            partials_kernel, "partials", ("tops", "sums"), "splits", _partials_shapes(w, 4, dim, 2)
        ),
        build(columns_kernel, "totals", ("row_tops", "log_sums", "total_out"), "size", totals),
        build(
            columns_kernel,
            "plain",
            ("row_tops", "log_sums", *plain),
            "size",
            {**some, "GROUPED": False, **absent},
        ),
        build(
            columns_kernel,
            "all",
            ("row_tops", "log_sums", *outputs),
            "size",
            {**every, "GROUPED": False},
        ),
    ]
