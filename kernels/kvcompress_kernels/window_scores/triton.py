"""Launch the Triton passes of `window_scores` for N rows."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import triton

from kvcompress_kernels.builds import (
    DIMS,
    FLOATS,
    Build,
    architecture,
    check_cache,
    float8,
    float8_suffix,
)
from kvcompress_kernels.contract import require
from kvcompress_kernels.window_scores.passes_triton import (
    columns_kernel,
    log_sum_kernel,
    partials_kernel,
)
from kvcompress_kernels.window_scores.pooled_triton import pooled_kernel
from kvcompress_kernels.window_scores.result import WindowScores

SPAN = 1024
"""Columns per program. It is fixed, so that a layer's scores do not depend on the batch."""
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
    """Score N rows with three launches, or four with `pooled`."""
    name, (rows, w, heads, dim) = "window_scores", query.shape
    block = key_pages.shape[3]
    pages = pages.contiguous()
    require(query.dtype in FLOATS, name, f"queries must be one of {list(FLOATS)}", query.dtype)
    check_cache(name, key_pages)

    # The kernels take the maximum of the logits before scaling, so the scale must be positive.
    factor, factors = 1.0, None
    if isinstance(scale, torch.Tensor):
        factors = scale / math.log(2)
    else:
        query, factor = (query, scale) if scale >= 0 else (-query, -scale)
        factor /= math.log(2)
    ragged = lengths is not None
    if lengths is None:
        # Fill on the device, because a copy from the host would sync.
        lengths = torch.full((rows,), tokens, dtype=torch.int32, device=query.device)
    arguments = _KernelArguments(
        tensors=(query, key_pages, pages, lengths.contiguous(), factors),
        numbers=(factor, w, heads // key_pages.shape[1]),
        strides=(*query.stride(), pages.stride(0), *key_pages.stride()),
        layout=0 if pages.shape[1] == 1 else block,
        splits=triton.cdiv(tokens, SPAN),
        dim=dim,
        itemsize=max(query.itemsize, key_pages.itemsize),
    )
    row_tops, log_sums, shares = _log_sums(arguments, pooled, sinks)
    scores = _columns(arguments, tokens, ragged, (row_tops, log_sums), variance, maximum, pooled)
    if pooled:
        shapes = _pooled_shapes(*arguments.model, architecture(query.device))
        pooled_kernel[arguments.grid(shapes["HEADS"])](
            *arguments.tensors,
            row_tops,
            log_sums,
            shares,
            scores.maximum,
            *arguments.numbers,
            tokens,
            *arguments.strides,
            BLOCK=arguments.layout,
            **shapes,
        )
    return scores


class _KernelArguments(NamedTuple):
    """Arguments that the kernels share.

    Args:
        tensors: query, key pages, pages, lengths, and one factor per row or None.
        numbers: factor of all rows, w, and query heads per KV head.
        strides: strides of the query, the pages and the key pages.
        layout: tokens per page, or 0 if each row is one page.
        splits: number of spans of `SPAN` columns.
        dim: head dimension.
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
        """Sizes that determine a kernel's configuration: w, group, head dim and itemsize."""
        _, w, group = self.numbers
        return w, group, self.dim, self.itemsize

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of rows, KV heads and query heads."""
        query, keys = self.tensors[:2]
        assert query is not None
        assert keys is not None
        return query.shape[0], keys.shape[1], query.shape[2]

    def tiles(self, heads: int) -> int:
        """Return the number of tiles of `heads` query heads in a group."""
        tiles: int = triton.cdiv(self.numbers[2], heads)
        return tiles

    def grid(self, heads: int, times: int = 1) -> tuple[int, int, int]:
        """Return the grid: tiles of `heads` query heads for every span, KV heads, rows."""
        rows, kv_heads, _ = self.sizes
        return self.tiles(heads) * times * self.splits, kv_heads, rows

    def new(self, *shape: int) -> torch.Tensor:
        query = self.tensors[0]
        assert query is not None
        return torch.empty(shape, dtype=torch.float32, device=query.device)


def _log_sums(
    arguments: _KernelArguments, pooled: bool, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return each line's maximum, log2 of its sum and pooling factor, ``[rows, Hq * w]`` each."""
    (rows, _, heads), (_, w, _), splits = arguments.sizes, arguments.numbers, arguments.splits
    lines = heads * w
    tops, sums = arguments.new(2, rows, splits, lines)
    past_sums, pooled_sums = arguments.new(2, rows, splits, lines) if pooled else (None, None)
    row_tops, log_sums = arguments.new(2, rows, lines)
    shares = arguments.new(rows, lines) if pooled else None
    shapes = _partials_shapes(*arguments.model, pooled)
    partials_kernel[arguments.grid(shapes["HEADS"], triton.cdiv(w, shapes["WINDOW"]))](
        *arguments.tensors,
        tops,
        sums,
        past_sums,
        pooled_sums,
        *arguments.numbers,
        splits,
        *arguments.strides,
        BLOCK=arguments.layout,
        **shapes,
    )
    log_sum_kernel[(triton.cdiv(lines, LOG_SUM["LINES"]), rows)](
        tops,
        sums,
        arguments.tensors[3],
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
    arguments: _KernelArguments,
    tokens: int,
    ragged: bool,
    sums: tuple[torch.Tensor, torch.Tensor],
    variance: bool,
    maximum: bool,
    pooled: bool,
) -> WindowScores:
    """Return the scores, except that a pooled maximum is left unwritten."""
    (rows, kv_heads, heads), (_, w, _) = arguments.sizes, arguments.numbers

    def result(*shape: int) -> torch.Tensor:
        # Programs write nothing past a row's length.
        return arguments.new(*shape).zero_() if ragged else arguments.new(*shape)

    sm = architecture(sums[0].device)
    shapes = _columns_shapes(*arguments.model, sm, variance, maximum and not pooled)
    parts = kv_heads * arguments.tiles(shapes["HEADS"]) * arguments.splits
    total, recent = result(rows, heads, tokens - w), arguments.new(rows, heads, w)
    last = result(rows, heads, tokens)
    variances = result(rows, heads, tokens - w) if variance else None
    entropies = result(rows, parts)
    shifts = result(rows, parts) if variance else None
    highest = result(rows, heads, tokens) if maximum else None
    columns_kernel[arguments.grid(shapes["HEADS"])](
        *arguments.tensors,
        *sums,
        total,
        variances,
        recent,
        last,
        None if pooled else highest,
        entropies,
        shifts,
        *arguments.numbers,
        tokens,
        *arguments.strides,
        BLOCK=arguments.layout,
        **shapes,
    )
    entropy = entropies.sum(1, dtype=torch.float64).float()
    shift = torch.zeros_like(entropy)
    if shifts is not None:
        shift = shifts.sum(1, dtype=torch.float64).float()
    return WindowScores(total, variances, entropy, shift, recent, last, highest)


def _shapes(
    w: int, group: int, dim: int, itemsize: int, min_rows: int, max_rows: int
) -> dict[str, int]:
    """Return the configuration and launch options of a program of `min_rows` to `max_rows` rows.

    A tile is 64 keys and at most 128 rows. In bf16 at D 128 with 4 warps, 16 KiB of K are in flight
    and the logits take 64 registers per thread. Float32 is multiplied without tensor cores, from
    registers, and gets at most 32 rows.
    """
    max_rows = 32 if itemsize == 4 else max_rows
    window = min(triton.next_power_of_2(w), max_rows)
    heads = min(triton.next_power_of_2(group), max_rows // window)
    heads = max(heads, min(min_rows, max_rows) // window)
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
    """Return the configuration of `partials_kernel`.

    Hopper's tensor cores need at least 64 rows to read K directly from shared memory. With fewer,
    K would go through registers, with narrow loads if it is stored transposed. With `pooled` and
    4 warps, Hopper would spill at 128 rows and D 256.
    """
    shapes = _shapes(w, group, dim, itemsize, 64, 128)
    wide = pooled and shapes["HEADS"] * shapes["WINDOW"] == 128
    return {**shapes, "num_warps": 8 if wide else 4}


def _log_sum_warps(pooled: bool) -> int:
    """Return the warps of `log_sum_kernel`. It joins three sums with `pooled`, else one."""
    return 8 if pooled else 4


def _columns_shapes(
    w: int, group: int, dim: int, itemsize: int, sm: int, variance: bool, maximum: bool
) -> dict[str, int]:
    """Return the configuration of `columns_kernel`.

    `tl.dot` needs at least 16 rows. The maximum number of rows needs 8 warps, because several
    ``[rows, columns]`` tiles are live. At 128 rows Blackwell, whose logits come from tensor memory,
    would spill, and so would Ampere without the variance. With the maximum and 8 warps Ampere would
    even spill at 64 rows.
    """
    max_rows = 64 if sm >= 100 or (sm < 90 and not variance) else 128
    shapes = _shapes(w, group, dim, itemsize, 16, max_rows)
    wide = shapes["HEADS"] * shapes["WINDOW"] == max_rows
    wide |= sm >= 100 and w == 1
    wide &= sm >= 90 or variance or not maximum
    return {**shapes, "CHUNKS": triton.cdiv(w, shapes["WINDOW"]), "num_warps": 8 if wide else 4}


def _pooled_shapes(w: int, group: int, dim: int, itemsize: int, sm: int) -> dict[str, int]:
    """Return the configuration of `pooled_kernel`.

    Two ``[rows, columns]`` tiles stay live. 8 warps hold 64 rows without spills, except on Ampere
    at D 64, where only 4 warps do.
    """
    shapes = _shapes(w, group, dim, itemsize, 16, 64)
    wide = shapes["HEADS"] * shapes["WINDOW"] == 64 and (sm >= 90 or dim > 64)
    return {**shapes, "CHUNKS": triton.cdiv(w, shapes["WINDOW"]), "num_warps": 8 if wide else 4}


def builds(sm: int) -> list[Build]:
    """Return builds for 4 query heads per KV head and blocks of 16, in bf16 and partly in float8.

    Head dims of a key are contiguous, as in every CUDA backend of vLLM. Only the CPU backend stores
    keys transposed, and no Triton kernel runs there.
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
    for dtype, kind in float8(sm).items():
        all_builds += _builds(128, 32, kind, sm)
        if dtype == torch.float8_e4m3fn:  # Layers may have different scales.
            all_builds += _builds(128, 32, kind, sm, scaled=True)
    for dim, w in [*product(DIMS, (32,)), *product((64, 128), (1, 8, 16, 64, 128))]:
        all_builds += _builds(dim, w, "*bf16", sm)
    return all_builds


def _builds(dim: int, w: int, kind: str, sm: int, *, scaled: bool = False) -> list[Build]:
    strides = [f"s_query_{axis}" for axis in ("row", "token", "head")]
    strides += ["s_pages", "s_page", "s_head", "s_slot"]
    inputs = {"query": "*bf16", "keys": kind, "pages": "*i64", "lengths": "*i32"}
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
        suffix = float8_suffix(kind) + (" scaled" if scaled else "")
        return Build(
            name=f"window_scores {part} D{dim} w{w}{suffix}",
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
        arguments = ("row_tops", "log_sums", *outputs, *pointers)
        return build(columns_kernel, part, arguments, "size", config)

    pooled = ("row_tops", "log_sums", "shares", "maximum_out")
    all_builds = [
        partials("partials"),
        partials("partials pooled", "past_sums", "pooled_sums"),
        # Scorers may request a maximum, and CAKE also requests a variance.
        columns("plain"),
        columns("maximum", "maximum_out"),
        columns("all", "variance_out", "shifts"),
        build(pooled_kernel, "pooled", pooled, "size", _pooled_shapes(w, 4, dim, 2, sm)),
    ]
    if w > 1:  # The variance needs two rows.
        all_builds.append(columns("all maximum", "variance_out", "shifts", "maximum_out"))
    return all_builds
