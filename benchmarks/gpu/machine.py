"""The machine: what it is, and whether its GPU kept its clocks while it was measured."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from benchmarks.origin import machine

SAMPLES = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
REASONS = "clocks_throttle_reasons.active"  # newer drivers know it by this name too
SLOWED = 0x08 | 0x20 | 0x40 | 0x80
"""NVML's bits: hardware slowdown, and slowdown for heat or by the power brake. Not the power cap,
under which large GPUs run as a matter of course."""
POWER_CAP = 0x04
EVERY_MS = 500


def facts() -> dict[str, Any]:
    """Machine, driver and versions."""
    import torch

    found: dict[str, Any] = {"processor": machine(), "python": sys.version.split()[0]}
    for name in ("torch", "triton", "vllm", "transformers", "vllm-kvcompress"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": device.name,
            "multiprocessors": device.multi_processor_count,
            "memory_gib": round(device.total_memory / 2**30, 1),
            "l2_mib": round(device.L2_cache_size / 2**20, 1),
            "cuda": torch.version.cuda,
            "driver": query("driver_version") or "unknown",
        }
    return found


def query(*names: str) -> str:
    """What the driver's own tool says of the first GPU; empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    ask = [tool, "-i", "0", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()


def sample(line: str) -> dict[str, float] | None:
    """A line of `SAMPLES` and `REASONS`; None if the tool could not tell one of them."""
    *figures, reasons = (cell.strip() for cell in line.split(","))
    try:
        found = dict(zip(SAMPLES, map(float, figures), strict=True))
        bits = int(reasons, 16)
    except ValueError:
        return None
    return found | {"slowed": bool(bits & SLOWED), "power_cap": bool(bits & POWER_CAP)}


@contextmanager
def watched_clocks(report: Any) -> Iterator[None]:
    """Watch the GPU's clocks: at those that heat or the board forces on it, figures are void."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield
        return judge_clocks(report, [])
    names = ",".join((*SAMPLES, REASONS))
    ask = [tool, "-i", "0", f"--query-gpu={names}", "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile("w+") as lines:
        watch = subprocess.Popen([*ask, "--loop-ms", str(EVERY_MS)], stdout=lines)
        try:
            yield
        finally:
            watch.kill()
            watch.wait()
            lines.seek(0)
            judge_clocks(report, [found for found in map(sample, lines) if found])


def judge_clocks(report: Any, seen: list[dict[str, float]]) -> None:
    if not seen:
        report.absent("GPU clocks", "nvidia-smi tells none")
        return
    for name in SAMPLES:
        values = sorted(x[name] for x in seen)
        middle = values[len(values) // 2]
        report.row("clocks", of=name, least=values[0], median=middle, most=values[-1])
    slowed, capped = (sum(x[what] for x in seen) / len(seen) for what in ("slowed", "power_cap"))
    note = f"{len(seen)} samples; at the power cap in {capped:.0%} of them"
    report.check("share of time at clocks slowed for heat", slowed, ("==", 0.0), note=note)
