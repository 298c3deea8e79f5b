"""Stage `speed`: each kernel's time beside its floor, the torch reference and torch.compile.

The ceilings, a large copy and a large matrix product, are measured first, in the same run. A floor
in bytes counts K once (`window_scores`), V once (`value_scores`), kept pages read and written
(`compact`), scores once (`select`). `column_sums` and `merge_evicted` are bound by arithmetic:
their floor is the operations of one product, at the measured matrix rate.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from h200_kernels import interpreted
from h200_ops import OPS, Op, window_args
from h200_problem import Problem, Shape
from h200_report import Report

POOL_BYTES = 40 << 30  # of K and V; longer and larger batches get fewer layers
COPY_BYTES = 2 << 30
MATRIX = 8192
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of a call on the device, over `runs` calls, the caches cold before each.

    Args:
        eager_ms: a call from the host's side, launches included.
    """

    ms: float
    fastest: float
    slowest: float
    runs: int
    eager_ms: float


class Clock:
    """Times calls with events on a GPU; with the host's clock on a CPU, for a dry run.

    Before each call a buffer larger than the L2 is written, and the device is kept busy for as
    long as the host needs to launch the call, so that no gap between its kernels is the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
            self._buffer = torch.empty(size, dtype=torch.int8, device=device)

    def time(self, call: Call, *, seconds: float = 0.3, least: int = 3, most: int = 50) -> Timing:
        """The median of as many calls as fit into `seconds`, from `least` to `most`."""
        call()  # compiles
        self._wait()
        start = time.perf_counter()
        call()
        launched = time.perf_counter() - start
        self._wait()
        whole = time.perf_counter() - start
        runs = max(least if self.cuda else 1, min(most, int(seconds / whole)))
        times = self._on_device(call, runs, launched) if self.cuda else on_host(call, runs)
        return Timing(
            ms=statistics.median(times),
            fastest=min(times),
            slowest=max(times),
            runs=runs,
            eager_ms=1e3 * whole,
        )

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _on_device(self, call: Call, runs: int, launched: float) -> list[float]:
        pause = int(min(2 * launched, 0.02) * 2e9)  # cycles, at most 20 ms of a 2 GHz clock
        pairs = []
        for run in range(runs):
            self._buffer.fill_(run % 100)
            torch.cuda._sleep(pause)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            pairs.append((start, stop))
        self._wait()
        return [start.elapsed_time(stop) for start, stop in pairs]


def on_host(call: Call, runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def shapes(dry: bool) -> list[Shape]:
    if dry:
        small = {"heads": 4, "kv_heads": 2, "dim": 16, "window": 8, "chunk": 32, "budget": 0.3}
        return [Shape(layers=1, requests=1, tokens=60, **small)]
    every = [
        Shape(requests=batch, tokens=tokens) for tokens in (8192, 32768, 131072) for batch in (1, 8)
    ]
    return [fitting(shape) for shape in every]


def fitting(shape: Shape) -> Shape:
    """`shape` with as many layers, up to its own, as `POOL_BYTES` hold."""
    a_layer = 2 * shape.requests * shape.tokens * shape.kv_heads * shape.dim * shape.dtype.itemsize
    layers = shape.layers
    while layers > 1 and layers * a_layer > POOL_BYTES:
        layers //= 2
    return replace(shape, layers=layers)


def ceilings(report: Report, clock: Clock, device: torch.device) -> tuple[float, float]:
    """Bytes a second of a copy, read and written, and operations a second of a matrix product."""
    size, side = (1 << 20, 128) if report.dry else (COPY_BYTES, MATRIX)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    copy = clock.time(lambda: target.copy_(source))
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    product = clock.time(lambda: a @ b)
    bandwidth, rate = 2 * size / copy.ms * 1e3, 2 * side**3 / product.ms * 1e3
    for what, amount, timing, figure in (
        ("copy", f"{size} bytes", copy, f"{bandwidth / 1e9:.0f} GB/s"),
        ("matrix product", f"{side} cubed, bf16", product, f"{rate / 1e12:.0f} TFLOP/s"),
    ):
        report.row("ceilings", what=what, of=amount, rate=figure, ms=timing.ms, runs=timing.runs)
    return bandwidth, rate


def speed(report: Report, device: torch.device) -> None:
    interpreted()
    clock = Clock(device)
    bandwidth, rate = ceilings(report, clock, device)
    for shape in shapes(report.dry):
        p = Problem(shape, device, report.seed, poison=False)
        for op in OPS:
            if op.plain is not None:
                one_op(report, clock, op, p, bandwidth, rate)
        if shape.requests == 1:
            one_layer(report, clock, p)
            compiled_scores(report, clock, p)
        del p
        gc.collect()
        if clock.cuda:
            torch.cuda.empty_cache()


def one_op(report: Report, clock: Clock, op: Op, p: Problem, bandwidth: float, rate: float) -> None:
    shape = p.shape
    size = f"{shape.tokens} x {shape.requests}"
    floor = 1e3 * max(op.floor_bytes(shape) / bandwidth, op.floor_flops(shape) / rate)
    try:
        timing = clock.time(lambda: op.launch(p))
        plain = clock.time(lambda: op.plain(p, 0), seconds=0.05, least=1)
    except Exception as e:  # the other ops may still be timed
        report.failed(f"{op.name}, {size}", f"{type(e).__name__}: {str(e).strip()[-300:]}")
        return
    # the reference takes a layer of a request at a time, `page_tables` all of them
    plain_ms = plain.ms * (1 if op.name == "page_tables" else shape.rows)
    report.row(
        "kernels, all layers and requests in one call",
        op=op.name,
        tokens=shape.tokens,
        batch=shape.requests,
        layers=shape.layers,
        ms=timing.ms,
        fastest=timing.fastest,
        slowest=timing.slowest,
        runs=timing.runs,
        floor_ms=floor,
        floor="arithmetic" if op.floor_flops(shape) else "bytes",
        of_floor=floor / timing.ms,
        passes=op.passes,
        eager_ms=timing.eager_ms,
        plain_torch_ms=plain_ms,
        plain_over_triton=plain_ms / timing.ms,
    )
    if op.goal is not None:
        name = f"{op.name}, {size}: floor over time"
        report.check(name, floor / timing.ms, (">=", op.goal), measured=True)


def one_layer(report: Report, clock: Clock, p: Problem) -> None:
    """The public ops on one layer of one request, as a step calls those that score."""
    for op in OPS:
        if not op.alone(p, 0):
            continue
        timing = clock.time(lambda op=op: op.alone(p, 0), seconds=0.05)
        report.row(
            "public ops, one layer of one request",
            op=op.name,
            tokens=p.shape.tokens,
            ms=timing.ms,
            runs=timing.runs,
            eager_ms=timing.eager_ms,
        )


def dense_scores(
    query: torch.Tensor, key_pages: torch.Tensor, pages: torch.Tensor, tokens: int, scale: float
) -> torch.Tensor:
    """The mean over a KV head's query heads of the window's attention, as torch is written."""
    w, _, dim = query.shape
    kv_heads, past = key_pages.shape[1], tokens - w
    keys = key_pages[pages].permute(1, 2, 0, 3).reshape(kv_heads, dim, -1)[..., :tokens]
    rows = query.view(w, kv_heads, -1, dim).permute(1, 2, 0, 3)  # [Hkv, G, w, D]
    logits = scale * (rows.flatten(1, 2) @ keys).float().view(kv_heads, -1, w, tokens)
    key = torch.arange(tokens, device=query.device)
    a = logits.masked_fill(key > key[past:, None], -torch.inf).softmax(-1)
    return a[..., :past].sum(2).mean(1)


def compiled_scores(report: Report, clock: Clock, p: Problem) -> None:
    """`dense_scores` of one layer of one request, by itself and compiled, times the rows."""
    times: dict[str, float | str] = {}
    forms: dict[str, Callable[..., Any]] = {"torch": dense_scores}
    if not report.dry:
        forms["torch.compile"] = torch.compile(dense_scores, dynamic=False)
    for name, form in forms.items():
        try:
            timing = clock.time(lambda form=form: form(*window_args(p, 0)), seconds=0.1)
            times[f"{name}_ms"] = timing.ms * p.shape.rows
        except Exception as e:  # a compiler that is missing is no fault of the kernels
            times[f"{name}_ms"] = f"{type(e).__name__}: {str(e).strip()[:100]}"
    shape = p.shape
    size = {"tokens": shape.tokens, "layers": shape.layers}
    report.row("window_scores in torch", **size, **times)
