"""Launches the passes of `window_scores`, for several layers of a prompt at once."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import triton

from kvcompress_kernels.builds import DIMS, FLOATS, Build, architecture, check_cache, float8, named
from kvcompress_kernels.contract import require
from kvcompress_kernels.window_scores.passes_triton import (
    columns_kernel,
    log_sum_kernel,
    partials_kernel,
)
from kvcompress_kernels.window_scores.pooled_triton import pooled_kernel
from kvcompress_kernels.window_scores.result import WindowScores

SPAN = 1024
"""AttentionStats of a program. Fixed, so that a layer's scores do not depend on those beside it."""
LOG_SUM = {"SPAN": SPAN, "LINES": 32, "SPLITS": 64}


def run_rows(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float | torch.Tensor,
    lengths: torch.Tensor | None,
    variance: bool,
    maximum: bool,
    pooled: bool,
    sinks: torch.Tensor | None = None,
) -> WindowScores:
    """Three launches, four where rows are pooled, whatever the number of rows."""
    name, (rows, w, heads, dim) = "window_scores", query.shape
    block = key_pages.shape[3]
    pages = pages.contiguous()
    require(query.dtype in FLOATS, name, f"queries must be one of {list(FLOATS)}", query.dtype)
    check_cache(name, key_pages)

    # The kernels take the top of the logits before they scale, so the scale must be positive.
    factor, factors = 1.0, None
    if isinstance(scale, torch.Tensor):
        factors = scale / math.log(2)
    else:
        query, factor = (query, scale) if scale >= 0 else (-query, -scale)
        factor /= math.log(2)
    ragged = lengths is not None
    if lengths is None:
        # filled on the device: copying from the host would wait for it
        lengths = torch.full((rows,), tokens, dtype=torch.int32, device=query.device)
    given = _Given(
        tensors=(query, key_pages, pages, lengths.contiguous(), factors),
        numbers=(factor, w, heads // key_pages.shape[1]),
        strides=(*query.stride(), pages.stride(0), *key_pages.stride()),
        layout=0 if pages.shape[1] == 1 else block,
        splits=triton.cdiv(tokens, SPAN),
        dim=dim,
        itemsize=max(query.itemsize, key_pages.itemsize),
    )
    row_tops, log_sums, shares = _log_sums(given, pooled, sinks)
    scores = _columns(given, tokens, ragged, (row_tops, log_sums), variance, maximum, pooled)
    if pooled:
        shapes = _pooled_shapes(*given.model, architecture(query.device))
        pooled_kernel[given.grid(shapes["HEADS"])](
            *given.tensors,
            row_tops,
            log_sums,
            shares,
            scores.maximum,
            *given.numbers,
            tokens,
            *given.strides,
            BLOCK=given.layout,
            **shapes,
        )
    return scores


class _Given(NamedTuple):
    """Arguments that the kernels share.

    Args:
        tensors: query, key pages, pages, lengths, and a factor for each row or None.
        numbers: the factor of all rows, w, and the query heads of a KV head.
        strides: of the query, the pages and the key pages.
        layout: tokens of a page; 0 where each row is in one page.
        splits: spans of columns.
        dim: of a head.
        itemsize: bytes of the wider of queries and keys.
    """

    tensors: tuple[torch.Tensor | None, ...]
    numbers: tuple[float, int, int]
    strides: tuple[int, ...]
    layout: int
    splits: int
    dim: int
    itemsize: int

    @property
    def model(self) -> tuple[int, int, int, int]:
        """What the configuration of a kernel depends on."""
        _, w, group = self.numbers
        return w, group, self.dim, self.itemsize

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, KV heads and query heads."""
        query, keys = self.tensors[:2]
        assert query is not None
        assert keys is not None
        return query.shape[0], keys.shape[1], query.shape[2]

    def tiles(self, heads: int) -> int:
        """Tiles of `heads` query heads in a group."""
        tiles: int = triton.cdiv(self.numbers[2], heads)
        return tiles

    def grid(self, heads: int, times: int = 1) -> tuple[int, int, int]:
        """Programs: tiles of `heads` query heads in every span, KV heads, rows."""
        rows, kv_heads, _ = self.sizes
        return self.tiles(heads) * times * self.splits, kv_heads, rows

    def new(self, *shape: int) -> torch.Tensor:
        query = self.tensors[0]
        assert query is not None
        return torch.empty(shape, dtype=torch.float32, device=query.device)


def _log_sums(
    given: _Given, pooled: bool, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Each line's top and log of its sum, and the factor on a pooled one: ``[rows, Hq * w]``."""
    (rows, _, heads), (_, w, _), splits = given.sizes, given.numbers, given.splits
    lines = heads * w
    tops, sums = given.new(2, rows, splits, lines)
    past_sums, pooled_sums = given.new(2, rows, splits, lines) if pooled else (None, None)
    row_tops, log_sums = given.new(2, rows, lines)
    shares = given.new(rows, lines) if pooled else None
    shapes = _partials_shapes(*given.model, pooled)
    partials_kernel[given.grid(shapes["HEADS"], triton.cdiv(w, shapes["WINDOW"]))](
        *given.tensors,
        tops,
        sums,
        past_sums,
        pooled_sums,
        *given.numbers,
        splits,
        *given.strides,
        BLOCK=given.layout,
        **shapes,
    )
    log_sum_kernel[(triton.cdiv(lines, LOG_SUM["LINES"]), rows)](
        tops,
        sums,
        given.tensors[3],
        past_sums,
        pooled_sums,
        row_tops,
        log_sums,
        shares,
        None if sinks is None else sinks / math.log(2),
        lines,
        splits,
        w,
        **LOG_SUM,
        num_warps=_log_sum_warps(pooled),
    )
    return row_tops, log_sums, shares


def _columns(
    given: _Given,
    tokens: int,
    ragged: bool,
    sums: tuple[torch.Tensor, torch.Tensor],
    variance: bool,
    maximum: bool,
    pooled: bool,
) -> WindowScores:
    """All that is reduced from the columns; the past of a pooled maximum is still to be written."""
    (rows, kv_heads, heads), (_, w, _) = given.sizes, given.numbers

    def result(*shape: int) -> torch.Tensor:
        # Programs write nothing behind a row's length.
        return given.new(*shape).zero_() if ragged else given.new(*shape)

    sm = architecture(sums[0].device)
    shapes = _columns_shapes(*given.model, sm, variance, maximum and not pooled)
    parts = kv_heads * given.tiles(shapes["HEADS"]) * given.splits
    total, recent = result(rows, heads, tokens - w), given.new(rows, heads, w)
    last = result(rows, heads, tokens)
    spread = result(rows, heads, tokens - w) if variance else None
    entropies = result(rows, parts)
    shifts = result(rows, parts) if variance else None
    most = result(rows, heads, tokens) if maximum else None
    columns_kernel[given.grid(shapes["HEADS"])](
        *given.tensors,
        *sums,
        total,
        spread,
        recent,
        last,
        None if pooled else most,
        entropies,
        shifts,
        *given.numbers,
        tokens,
        *given.strides,
        BLOCK=given.layout,
        **shapes,
    )
    entropy = entropies.sum(1, dtype=torch.float64).float()
    shift = torch.zeros_like(entropy)
    if shifts is not None:
        shift = shifts.sum(1, dtype=torch.float64).float()
    return WindowScores(total, spread, entropy, shift, recent, last, most)


def _shapes(
    w: int, group: int, dim: int, itemsize: int, least: int, max_rows: int
) -> dict[str, int]:
    """The configuration of a program of `least` to `max_rows` rows, launch options included.

    A tile is 64 keys and at most 128 rows: 16 KiB of K in flight and 64 registers a thread of
    logits with 4 warps at D 128, bf16. Float32 is multiplied without tensor cores, out of
    registers, and gets a quarter of the rows.
    """
    max_rows = 32 if itemsize == 4 else max_rows
    window = min(triton.next_power_of_2(w), max_rows)
    heads = min(triton.next_power_of_2(group), max_rows // window)
    heads = max(heads, min(least, max_rows) // window)
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


def _partials_shapes(w: int, group: int, dim: int, itemsize: int, pooled: bool) -> dict[str, int]:
    """64 rows are the fewest that Hopper's tensor cores take, with K straight from shared memory;
    with fewer, K would pass through registers, and narrow loads where it is stored transposed.
    With what rows are pooled by, Hopper's would spill at 128 rows and D 256."""
    shapes = _shapes(w, group, dim, itemsize, 64, 128)
    many = pooled and shapes["HEADS"] * shapes["WINDOW"] == 128
    return {**shapes, "num_warps": 8 if many else 4}


def _log_sum_warps(pooled: bool) -> int:
    """Three sums are joined where rows are pooled, and one elsewhere."""
    return 8 if pooled else 4


def _columns_shapes(
    w: int, group: int, dim: int, itemsize: int, sm: int, variance: bool, maximum: bool
) -> dict[str, int]:
    """16 rows are the fewest of `tl.dot`. The most need 8 warps: several maps of a tile are alive.
    Blackwell's logits, which come from its tensor memory, would spill at 128 rows, and Ampere's
    without the variance, with 8 warps and the maximum even at 64."""
    max_rows = 64 if sm >= 100 or (sm < 90 and not variance) else 128
    shapes = _shapes(w, group, dim, itemsize, 16, max_rows)
    many = shapes["HEADS"] * shapes["WINDOW"] == max_rows
    many |= sm >= 100 and w == 1
    many &= sm >= 90 or variance or not maximum
    return {**shapes, "CHUNKS": triton.cdiv(w, shapes["WINDOW"]), "num_warps": 8 if many else 4}


def _pooled_shapes(w: int, group: int, dim: int, itemsize: int, sm: int) -> dict[str, int]:
    """Two maps of a tile are alive throughout: 64 rows, where 8 warps hold them without spills,
    and on Ampere at D 64 only 4 do."""
    shapes = _shapes(w, group, dim, itemsize, 16, 64)
    many = shapes["HEADS"] * shapes["WINDOW"] == 64 and (sm >= 90 or dim > 64)
    return {**shapes, "CHUNKS": triton.cdiv(w, shapes["WINDOW"]), "num_warps": 8 if many else 4}


def builds(sm: int) -> list[Build]:
    """bf16 queries, 8 KV heads in groups of 4, block 16; keys of bf16 or, a few, of float8.

    Keys lie as every CUDA backend of vLLM has them, a token's dims side by side: only the CPU's
    stores them transposed, where no kernel runs.
    """
    plain = {**dict.fromkeys(("tops", "sums", "row_tops", "log_sums"), "*fp32"), "lengths": "*i32"}
    pooled = dict.fromkeys(("past_sums", "pooled_sums", "shares"), "*fp32")
    all_builds = [
        Build(
            name=name,
            kernel=log_sum_kernel,
            signature={**pointers, "lines": "i32", "splits": "i32", "w": "i32"},
            constexprs={**dict.fromkeys({*pooled, "sinks"} - set(pointers)), **LOG_SUM},
            warps=_log_sum_warps("shares" in pointers),
            aligned=tuple(pointers),
            wide_loads=False,
        )
        for name, pointers in (
            ("window_scores log_sum", plain),
            ("window_scores log_sum sinks", {**plain, "sinks": "*fp32"}),
            ("window_scores log_sum pooled", {**plain, **pooled}),
            ("window_scores log_sum pooled sinks", {**plain, **pooled, "sinks": "*fp32"}),
        )
    ]
    for dtype, of in float8(sm).items():
        all_builds += _builds(128, 32, of, sm)
        if dtype == torch.float8_e4m3fn:  # whose layers may each have a scale
            all_builds += _builds(128, 32, of, sm, scaled=True)
    for dim, w in [*product(DIMS, (32,)), *product((64, 128), (1, 8, 16, 64, 128))]:
        all_builds += _builds(dim, w, "*bf16", sm)
    return all_builds


def _builds(dim: int, w: int, of: str, sm: int, *, scaled: bool = False) -> list[Build]:
    strides = [f"s_query_{axis}" for axis in ("row", "token", "head")]
    strides += ["s_pages", "s_page", "s_head", "s_slot"]
    inputs = {"query": "*bf16", "keys": of, "pages": "*i64", "lengths": "*i32"}
    if scaled:
        inputs["factors"] = "*fp32"
    numbers = {"factor": "fp32", **dict.fromkeys(("w", "group", *strides), "i32")}
    aligned = [*inputs, *(x for x in strides if x != "s_pages")]
    outputs = ("total_out", "recent_out", "last_out", "entropies")
    optional = {"variance_out", "shifts", "maximum_out"}

    def build(kernel: Any, part: str, pointers: Sequence[str], size: str, config: Any) -> Build:
        constexprs = {"BLOCK": 16, "s_query_dim": 1, "s_dim": 1, **config}
        if not scaled:
            constexprs["factors"] = None
        return Build(
            name=f"window_scores {part} D{dim} w{w}{named(of)}{' scaled' if scaled else ''}",
            kernel=kernel,
            signature={**inputs, **dict.fromkeys(pointers, "*fp32"), **numbers, size: "i32"},
            warps=constexprs.pop("num_warps"),
            stages=constexprs.pop("num_stages"),
            constexprs=constexprs,
            aligned=(*aligned, *pointers),
            tensor_cores=True,
        )

    def partials(part: str, *pointers: str) -> Build:
        absent = dict.fromkeys({"past_sums", "pooled_sums"} - set(pointers))
        config = {**_partials_shapes(w, 4, dim, 2, bool(pointers)), **absent}
        return build(partials_kernel, part, ("tops", "sums", *pointers), "splits", config)

    def columns(part: str, *pointers: str) -> Build:
        made = [name in pointers for name in ("variance_out", "maximum_out")]
        absent = dict.fromkeys(optional - set(pointers))
        config = {**_columns_shapes(w, 4, dim, 2, sm, *made), **absent}
        asked = ("row_tops", "log_sums", *outputs, *pointers)
        return build(columns_kernel, part, asked, "size", config)

    pooled = ("row_tops", "log_sums", "shares", "maximum_out")
    every = [
        partials("partials"),
        partials("partials pooled", "past_sums", "pooled_sums"),
        # Scorers ask for a maximum or not, CAKE for a variance beside it.
        columns("plain"),
        columns("maximum", "maximum_out"),
        columns("all", "variance_out", "shifts"),
        build(pooled_kernel, "pooled", pooled, "size", _pooled_shapes(w, 4, dim, 2, sm)),
    ]
    if w > 1:  # of one row there is no variance
        every.append(columns("all maximum", "variance_out", "shifts", "maximum_out"))
    return every
