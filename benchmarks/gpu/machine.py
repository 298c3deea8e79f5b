"""Describe the machine, and check that its GPU was not slowed down during measurements."""

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
REASONS = "clocks_throttle_reasons.active"  # newer drivers still accept this name
SLOWED = 0x08 | 0x20 | 0x40 | 0x80
"""NVML throttle reasons that void a measurement: hardware, thermal and power-brake slowdown.

The software power cap is not among them, because large GPUs normally run at it.
"""
POWER_CAP = 0x04
SAMPLE_INTERVAL_MS = 500


def facts() -> dict[str, Any]:
    """Return processor, GPU, driver and package versions."""
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
    """Return nvidia-smi's CSV line for the first GPU, or "" if there is no nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "-i", "0", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def sample(line: str) -> dict[str, float] | None:
    """Parse a CSV line of `SAMPLES` and `REASONS`; None if a value is not available."""
    *values, reasons = (cell.strip() for cell in line.split(","))
    try:
        found = dict(zip(SAMPLES, map(float, values), strict=True))
        bits = int(reasons, 16)
    except ValueError:
        return None
    return found | {"slowed": bool(bits & SLOWED), "power_cap": bool(bits & POWER_CAP)}


@contextmanager
def clocks_checked(report: Any) -> Iterator[None]:
    """Sample the GPU clocks while the context is open, and fail if the GPU was throttled."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield
        return report_clocks(report, [])
    names = ",".join((*SAMPLES, REASONS))
    command = [tool, "-i", "0", f"--query-gpu={names}", "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile("w+") as lines:
        watch = subprocess.Popen([*command, "--loop-ms", str(SAMPLE_INTERVAL_MS)], stdout=lines)
        try:
            yield
        finally:
            watch.kill()
            watch.wait()
            lines.seek(0)
            report_clocks(report, [found for found in map(sample, lines) if found])


def report_clocks(report: Any, samples: list[dict[str, float]]) -> None:
    if not samples:
        report.absent("GPU clocks", "nvidia-smi reports none")
        return
    for name in SAMPLES:
        values = sorted(x[name] for x in samples)
        middle = values[len(values) // 2]
        report.row("clocks", of=name, least=values[0], median=middle, most=values[-1])
    slowed, capped = (
        sum(x[key] for x in samples) / len(samples) for key in ("slowed", "power_cap")
    )
    note = f"{len(samples)} samples; at the power cap in {capped:.0%} of them"
    report.check("share of time with throttled clocks", slowed, ("==", 0.0), note=note)
