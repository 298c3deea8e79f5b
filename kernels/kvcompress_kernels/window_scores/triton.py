"""Launch the Triton passes of `window_scores` for N rows."""

import math
from collections.abc import Callable
from functools import reduce
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
    flags_kernel,
    log_sum_kernel,
    partials_kernel,
)
from kvcompress_kernels.window_scores.pooled_triton import pooled_kernel
from kvcompress_kernels.window_scores.result import Outputs, WindowScores

_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
SPAN = 1024
"""Columns per program. It is fixed, so that a layer's scores do not depend on the batch."""
LOG_SUM = {"SPAN": SPAN, "LINES": 32, "SPLITS": 64}
FLAGS = {"SPAN": SPAN, "LINES": 256, "SPLITS": 8, "MAX_ERROR": 5e-5}
"""`MAX_ERROR`: a layer is scored again if an attention sum differs from 1 by more than this."""


def run_rows(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float | torch.Tensor,
    lengths: torch.Tensor | None,
    outputs: Outputs,
    sinks: torch.Tensor | None = None,
    row_log_sums: torch.Tensor | None = None,
) -> WindowScores:
    """Score N rows with three launches, or four with a pooled maximum.

    With `row_log_sums` there are five launches. The last three return at once if all sums are
    right.
    """
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
        tokens=tokens,
        ragged=ragged,
        dim=dim,
        itemsize=max(query.itemsize, key_pages.itemsize),
    )
    if sinks is not None or outputs.pooled:
        row_log_sums = None
    columns = _Columns(arguments, outputs, one_pass=row_log_sums is not None)
    if row_log_sums is not None and columns.one_pass:
        flags = columns.launch_with_log_sums(row_log_sums.contiguous())
        row_tops, log_sums, _ = _log_sums(arguments, flags=flags)
        columns.launch(row_tops, log_sums, flags=flags)
        return columns.scores()
    row_tops, log_sums, shares = _log_sums(arguments, outputs.pooled, sinks)
    columns.launch(row_tops, log_sums)
    scores = columns.scores()
    if shares is None:
        return scores
    maximum = _pooled_maximum(arguments, (row_tops, log_sums, shares), outputs.grouped)
    return scores._replace(maximum=maximum)


class _KernelArguments(NamedTuple):
    """Arguments that the kernels share.

    Args:
        tensors: query, key pages, pages, lengths, and one factor per row or None.
        numbers: factor of all rows, w, and query heads per KV head.
        strides: strides of the query, the pages and the key pages.
        layout: tokens per page, or 0 if each row is one page.
        tokens: columns of the longest row.
        ragged: whether rows may be shorter.
        dim: head dimension.
        itemsize: bytes of the wider of queries and keys.
    """

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
    numbers: tuple[float, int, int]
    strides: tuple[int, ...]
    layout: int
    tokens: int
    ragged: bool
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
        return query.shape[0], keys.shape[1], query.shape[2]

    @property
    def splits(self) -> int:
        """Return the number of spans of `SPAN` columns."""
        return -(-self.tokens // SPAN)

    def tiles(self, heads: int) -> int:
        """Return the number of tiles of `heads` query heads in a group."""
        return -(-self.numbers[2] // heads)

    def grid(self, heads: int, times: int = 1) -> tuple[int, int, int]:
        """Return the grid: tiles of `heads` query heads for every span, KV heads, rows."""
        rows, kv_heads, _ = self.sizes
        return self.tiles(heads) * times * self.splits, kv_heads, rows

    def new(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.tensors[0].device)

    def result(self, *shape: int) -> torch.Tensor:
        """Allocate a result. Programs write nothing past a row's length."""
        return self.new(*shape).zero_() if self.ragged else self.new(*shape)

    def lines(self, heads: int, grouped: bool) -> int:
        """Return the lines that programs of `heads` query heads write for a row.

        One per query head, or with `grouped` one per program of each KV head.
        """
        _, kv_heads, query_heads = self.sizes
        return kv_heads * self.tiles(heads) if grouped else query_heads


def _log_sums(
    arguments: _KernelArguments,
    pooled: bool = False,
    sinks: torch.Tensor | None = None,
    flags: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return each line's maximum, log2 of its sum and pooling factor, ``[rows, Hq * w]`` each.

    They are not initialised in a row whose flag is 0.
    """
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
        flags,
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
        flags,
        lines,
        splits,
        w,
        **LOG_SUM,
        num_warps=_log_sum_warps(pooled),
    )
    return row_tops, log_sums, shares


class _Columns:
    """The launches of `columns_kernel` and their results, except a pooled maximum."""

    def __init__(self, arguments: _KernelArguments, outputs: Outputs, *, one_pass: bool) -> None:
        self._arguments = arguments
        self._grouped = outputs.grouped
        (rows, kv_heads, _), (_, w, _) = arguments.sizes, arguments.numbers
        sm, tokens, variance = (
            architecture(arguments.tensors[0].device),
            arguments.tokens,
            outputs.variance,
        )
        maximum = outputs.maximum and not outputs.pooled
        self.one_pass = one_pass and _fits_one_pass(*arguments.model, sm, variance, maximum)
        shapes = _columns_shapes(*arguments.model, sm, variance, maximum, self.one_pass)
        self._shapes = shapes
        heads = shapes["HEADS"]
        lines = arguments.lines(heads, outputs.grouped)
        parts = kv_heads * arguments.tiles(heads) * arguments.splits
        self._total = arguments.result(rows, lines, tokens - w)
        self._variance = arguments.result(rows, lines, tokens - w) if variance else None
        self._recent = arguments.new(rows, lines, w)
        self._last = arguments.result(rows, lines, tokens) if outputs.last else None
        self._maximum = arguments.result(rows, lines, tokens) if maximum else None
        self._entropies = arguments.result(rows, parts)
        self._shifts = arguments.result(rows, parts) if variance else None

    def launch(
        self,
        row_tops: torch.Tensor | None,
        log_sums: torch.Tensor,
        row_sums: torch.Tensor | None = None,
        flags: torch.Tensor | None = None,
    ) -> None:
        """Write the results of all rows, or with `flags` of the rows whose flag is set."""
        arguments = self._arguments
        columns_kernel[arguments.grid(self._shapes["HEADS"])](
            *arguments.tensors,
            row_tops,
            log_sums,
            row_sums,
            flags,
            self._total,
            self._variance,
            self._recent,
            self._last,
            self._maximum,
            self._entropies,
            self._shifts,
            *arguments.numbers,
            arguments.tokens,
            *arguments.strides,
            BLOCK=arguments.layout,
            GROUPED=self._grouped,
            **self._shapes,
        )

    def launch_with_log_sums(self, row_log_sums: torch.Tensor) -> torch.Tensor:
        """Write the results of all rows, and return the flags of rows with a wrong logsumexp."""
        arguments = self._arguments
        (rows, _, heads), (_, w, _) = arguments.sizes, arguments.numbers
        row_sums = arguments.new(rows, arguments.splits, heads * w)
        flags = torch.empty(rows, dtype=torch.int32, device=row_log_sums.device)
        self.launch(None, row_log_sums, row_sums)
        lengths = arguments.tensors[3]
        flags_kernel[(rows,)](
            row_sums, lengths, flags, heads * w, arguments.splits, **FLAGS, num_warps=4
        )
        return flags

    def scores(self) -> WindowScores:
        """Return the results."""
        lines = {
            "total": self._total,
            "variance": self._variance,
            "recent": self._recent,
            "last": self._last,
            "maximum": self._maximum,
        }
        if self._grouped:
            kv_heads = self._arguments.sizes[1]
            for name, x in lines.items():
                join = torch.maximum if name == "maximum" else torch.add
                lines[name] = None if x is None else _joined(x, kv_heads, join)
        entropy = self._entropies.sum(1, dtype=torch.float64).float()
        shift = torch.zeros_like(entropy)
        if self._shifts is not None:
            shift = self._shifts.sum(1, dtype=torch.float64).float()
        return WindowScores(entropy=entropy, shift=shift, **lines)  # type: ignore[arg-type]


def _pooled_maximum(
    arguments: _KernelArguments,
    sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grouped: bool,
) -> torch.Tensor:
    """Return the maximum over the pooled rows."""
    shapes = _pooled_shapes(*arguments.model, architecture(sums[0].device))
    lines = arguments.lines(shapes["HEADS"], grouped)
    maximum = arguments.result(arguments.sizes[0], lines, arguments.tokens)
    pooled_kernel[arguments.grid(shapes["HEADS"])](
        *arguments.tensors,
        *sums,
        maximum,
        *arguments.numbers,
        arguments.tokens,
        *arguments.strides,
        BLOCK=arguments.layout,
        GROUPED=grouped,
        **shapes,
    )
    return _joined(maximum, arguments.sizes[1], torch.maximum) if grouped else maximum


def _joined(
    lines: torch.Tensor,
    kv_heads: int,
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Join the lines that several programs wrote for one KV head.

    Adding one line at a time gives equal columns equal sums. The order of `torch.sum` may differ.
    """
    tiles = lines.shape[1] // kv_heads
    return reduce(join, (lines[:, tile::tiles] for tile in range(tiles)))


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
        "num_stages": 5,
    }


def _partials_shapes(w: int, group: int, dim: int, itemsize: int, pooled: bool) -> dict[str, int]:
    """Return the configuration of `partials_kernel`.

    Hopper's tensor cores need at least 64 rows to read K directly from shared memory. With fewer,
    K would go through registers, with narrow loads if it is stored transposed. With `pooled` and
    4 warps, Hopper would spill at 128 rows and D 256.
    """
    shapes = _shapes(w, group, dim, itemsize, 64, 128)
    wide = pooled and shapes["HEADS"] * shapes["WINDOW"] == 128
    # More stages would spill on Blackwell.
    return {**shapes, "num_warps": 8 if wide else 4, "num_stages": 3 if pooled else 5}


def _log_sum_warps(pooled: bool) -> int:
    """Return the warps of `log_sum_kernel`. It joins three sums with `pooled`, else one."""
    return 8 if pooled else 4


def _columns_shapes(
    w: int,
    group: int,
    dim: int,
    itemsize: int,
    sm: int,
    variance: bool,
    maximum: bool,
    one_pass: bool,
) -> dict[str, int]:
    """Return the configuration of `columns_kernel`.

    `tl.dot` needs at least 16 rows. 4 warps share a tile of 64 keys along its keys, so that no sum
    over rows crosses warps. With more rows they would spill, soonest on Blackwell, where logits
    come from tensor memory, and with a variance before Triton 3.9. A head of more than 64 rows or
    of several chunks needs 8 warps.
    """
    many_registers = variance and (maximum or _TRITON < (3, 9))
    max_rows = 128 if sm == 90 and not many_registers else 64
    if sm >= 100 and (dim > 128 or one_pass or (variance and maximum)):
        max_rows = 32
    shapes = _shapes(w, group, dim, itemsize, 16, max_rows)
    chunks = triton.cdiv(w, shapes["WINDOW"])
    return {**shapes, "CHUNKS": chunks, "num_warps": 8 if w > 64 or chunks > 1 else 4}


def _fits_one_pass(
    w: int, group: int, dim: int, itemsize: int, sm: int, variance: bool, maximum: bool
) -> bool:
    """Return whether `columns_kernel` can add up each row of the attention.

    A program needs all rows of its query heads at once. At D 256, it would spill on Blackwell.
    """
    shapes = _columns_shapes(w, group, dim, itemsize, sm, variance, maximum, True)
    return shapes["CHUNKS"] == 1 and (sm < 100 or dim <= 128)


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
    parts = ("past_sums", "pooled_sums", "shares")
    all_builds = [
        Build(
            name=f"window_scores log_sum{name}",
            kernel=log_sum_kernel,
            config={
                **dict.fromkeys({*parts, "sinks", "flags"} - {*given}),
                **LOG_SUM,
                "num_warps": _log_sum_warps("shares" in given),
            },
            types=_TYPES,
            wide_loads=False,
        )
        for name, given in (
            ("", ()),
            (" flags", ("flags",)),
            (" sinks", ("sinks",)),
            (" pooled", parts),
            (" pooled sinks", (*parts, "sinks")),
        )
    ]
    for dtype, kind in float8(sm).items():
        all_builds += _builds(128, 32, kind, sm)
        if dtype == torch.float8_e4m3fn:  # Layers may have different scales.
            all_builds += _builds(128, 32, kind, sm, scaled=True)
    for dim, w in [*product(DIMS, (32,)), *product((64, 128), (1, 8, 16, 64, 128))]:
        all_builds += _builds(dim, w, "*bf16", sm)
    return all_builds


_FLOAT_POINTERS = (
    *("factors", "tops", "sums", "past_sums", "pooled_sums", "row_tops", "log_sums", "row_sums"),
    *("shares", "sinks", "total_out", "variance_out", "recent_out", "last_out", "maximum_out"),
    *("entropies", "shifts"),
)
_TYPES = {
    **dict.fromkeys(_FLOAT_POINTERS, "*fp32"),
    **{"query": "*bf16", "pages": "*i64", "lengths": "*i32", "flags": "*i32", "factor": "fp32"},
}
"""Types of the kernels' arguments, except of the keys and of 32-bit integers."""


def _builds(dim: int, w: int, kind: str, sm: int, *, scaled: bool = False) -> list[Build]:
    def build(kernel: Any, part: str, config: Any) -> Build:
        absent = {x: None for x in ("flags", "factors") if x in kernel.arg_names}
        if scaled:
            del absent["factors"]
        one_chunk = config.get("CHUNKS", 1) == 1
        logits = config["HEADS"] * config["WINDOW"] * config["COLUMNS"]
        suffix = float8_suffix(kind) + (" scaled" if scaled else "")
        return Build(
            name=f"window_scores {part} D{dim} w{w}{suffix}",
            kernel=kernel,
            config={"BLOCK": 16, "s_query_dim": 1, "s_dim": 1, **absent, **config},
            types={**_TYPES, "keys": kind},
            tensor_cores=True,
            logits=logits if one_chunk and kernel is not pooled_kernel else 0,
            prefetches=one_chunk and "pooled" not in part,
        )

    def partials(part: str, *, pooled: bool = False) -> Build:
        absent = {} if pooled else {"past_sums": None, "pooled_sums": None}
        config = _partials_shapes(w, 4, dim, 2, pooled)
        return build(partials_kernel, part, {**config, **absent})

    def columns(part: str, *outputs: str, grouped: bool = True, passes: int = 2) -> Build:
        variance, maximum = (name in outputs for name in ("variance_out", "maximum_out"))
        optional = {"variance_out", "shifts", "last_out", "maximum_out"} - {*outputs}
        optional.add("row_sums" if passes == 2 else "row_tops")
        config = _columns_shapes(w, 4, dim, 2, sm, variance, maximum, passes == 1)
        options = {**config, **dict.fromkeys(optional), "GROUPED": grouped}
        return build(columns_kernel, part, options)

    def pooled(part: str, *, grouped: bool = True) -> Build:
        config = {**_pooled_shapes(w, 4, dim, 2, sm), "GROUPED": grouped}
        return build(pooled_kernel, part, config)

    variance = "variance_out", "shifts"
    all_builds = [
        partials("partials"),
        partials("partials pooled", pooled=True),
        columns("plain"),
        pooled("pooled"),
    ]
    if w > 1:  # The variance needs two rows. CAKE reads it.
        all_builds += [
            columns("variance", *variance),
            columns("heads all", *variance, "last_out", "maximum_out", grouped=False),
        ]
    if _fits_one_pass(w, 4, dim, 2, sm, False, False):
        all_builds.append(columns("plain, one pass", passes=1))
    if w > 1 and _fits_one_pass(w, 4, dim, 2, sm, True, False):
        all_builds.append(columns("variance, one pass", *variance, passes=1))
    if w == 32:  # Further combinations that scorers read.
        all_builds += [
            columns("maximum", "maximum_out"),
            columns("last", "last_out"),
            columns("variance maximum", *variance, "maximum_out"),
            columns("heads", grouped=False),
            pooled("pooled heads", grouped=False),
        ]
    return all_builds
