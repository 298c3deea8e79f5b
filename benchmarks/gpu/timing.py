"""Times of calls on a GPU, and the two rates that bound them, measured on the same GPU."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

COPY_BYTES = 2 << 30
MATRIX = 8192
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of a call on the device, over `runs` calls, the caches cold before each.

    Args:
        host_ms: the call as the host sees it, launches included.
    """

    ms: float
    fastest: float
    slowest: float
    runs: int
    host_ms: float


class Clock:
    """Times calls with events on a GPU; once and by the host's clock on a CPU, for a dry run.

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
        if not self.cuda:
            ms = on_host(call)
            return Timing(ms=ms, fastest=ms, slowest=ms, runs=1, host_ms=ms)
        call()  # compiles
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        launched = time.perf_counter() - start
        torch.cuda.synchronize()
        whole = time.perf_counter() - start
        runs = max(least, min(most, int(seconds / whole)))
        times = self._on_device(call, runs, launched)
        return Timing(
            ms=statistics.median(times),
            fastest=min(times),
            slowest=max(times),
            runs=runs,
            host_ms=1e3 * whole,
        )

    def _on_device(self, call: Call, runs: int, launched: float) -> list[float]:
        pause = int(min(2 * launched, 0.05) * 2e9)  # cycles, at most 50 ms of a 2 GHz clock
        pairs = []
        for run in range(runs):
            self._buffer.fill_(run % 100)
            torch.cuda._sleep(pause)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs]


def on_host(call: Call) -> float:
    """Milliseconds of one call on a CPU."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU reaches: bytes a second of a large copy, read and written, and operations a
    second of a large matrix product in bfloat16. No data sheet is asked."""

    bandwidth: float
    flops: float

    def floor_ms(self, moved: int, operations: int) -> float:
        """The least time that this work can take."""
        return 1e3 * max(moved / self.bandwidth, operations / self.flops)


def ceilings(report: Any, clock: Clock, device: torch.device) -> Ceilings:
    size, side = (1 << 20, 128) if report.dry else (COPY_BYTES, MATRIX)
    if clock.cuda:
        size = min(size, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    copy = clock.time(lambda: target.copy_(source))
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    product = clock.time(lambda: a @ b)
    found = Ceilings(2 * size / copy.ms * 1e3, 2 * side**3 / product.ms * 1e3)
    for what, amount, timing, rate in (
        ("copy", f"{size} bytes", copy, f"{found.bandwidth / 1e9:.0f} GB/s"),
        ("matrix product", f"{side} cubed, bf16", product, f"{found.flops / 1e12:.0f} TFLOP/s"),
    ):
        report.row("ceilings", what=what, of=amount, rate=rate, ms=timing.ms, runs=timing.runs)
    return found
