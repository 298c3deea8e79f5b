"""Measure times of GPU calls, and the GPU's memory bandwidth and arithmetic rate."""

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
    """Milliseconds of a call on the device over `runs` calls, each with cold caches.

    Args:
        ms: median.
        host_ms: one call as seen by the host, including kernel launches.
    """

    ms: float
    fastest: float
    slowest: float
    runs: int
    host_ms: float


class Clock:
    """Times calls with CUDA events. On a CPU (dry run) it times one call with the host clock.

    Before each call it writes a buffer larger than the L2 cache. It then keeps the device busy for
    as long as the host needs to launch the call, so that launches leave no gaps between kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
            self._buffer = torch.empty(size, dtype=torch.int8, device=device)

    def time(
        self, call: Call, *, seconds: float = 0.3, min_runs: int = 3, max_runs: int = 50
    ) -> Timing:
        """Time as many calls as fit into `seconds`, from `min_runs` to `max_runs`."""
        if not self.cuda:
            ms = on_host(call)
            return Timing(ms=ms, fastest=ms, slowest=ms, runs=1, host_ms=ms)
        call()  # compiles
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        launch_seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        total = time.perf_counter() - start
        runs = max(min_runs, min(max_runs, int(seconds / total)))
        times = self._on_device(call, runs, launch_seconds)
        return Timing(
            ms=statistics.median(times),
            fastest=min(times),
            slowest=max(times),
            runs=runs,
            host_ms=1e3 * total,
        )

    def _on_device(self, call: Call, runs: int, launch_seconds: float) -> list[float]:
        pause = int(min(2 * launch_seconds, 0.05) * 2e9)  # cycles, at most 50 ms of a 2 GHz clock
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
    """Return the milliseconds of one call on a CPU."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that this GPU reached, measured instead of taken from a data sheet.

    Args:
        bandwidth: bytes per second of a large copy, reads plus writes.
        flops: operations per second of a large bfloat16 matrix product.
    """

    bandwidth: float
    flops: float

    def floor_ms(self, moved: int, operations: int) -> float:
        """Return the minimum time for this work in milliseconds."""
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
