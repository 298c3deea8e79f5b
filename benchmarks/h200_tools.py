"""Stages `sanitizer` and `ncu`: NVIDIA's own tools on small programs that launch the kernels.

    python benchmarks/h200_tools.py launch            every kernel once, on small shapes
    python benchmarks/h200_tools.py planted           one kernel, told to write where nothing is
    python benchmarks/h200_tools.py profile OP        one op at 8B shapes, 8k tokens

A tool that is missing or not allowed is told so, never taken for a check that passed.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from h200_ops import OPS, Op
from h200_problem import Problem, Shape
from h200_report import Report

SMALL = Shape(layers=1, requests=2, tokens=300, chunk=64, ragged=True)
LARGE = Shape(requests=1, tokens=8192)
SECTIONS = (
    "GPU Speed Of Light Throughput",
    "Memory Workload Analysis",
    "Compute Workload Analysis",
    "Occupancy",
    "Launch Statistics",
    "Warp State Statistics",
)
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
TAIL = 600  # characters of a tool's output that a note repeats


def command(tool: Sequence[str], *program: str) -> list[str]:
    return [*tool, sys.executable, str(Path(__file__)), *program]


def run(
    line: Sequence[str], seconds: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Of a program that overran, return code 124."""
    try:
        return subprocess.run(
            list(line),
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**os.environ, **environment},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(line, 124, "", f"took more than {seconds:.0f} s")


# -- compute-sanitizer -------------------------------------------------------------------------


def sanitizer(report: Report, device: torch.device) -> None:
    path = shutil.which("compute-sanitizer")
    if path is None or device.type != "cuda":
        why = "compute-sanitizer is not installed" if path is None else "no GPU"
        for tool in ("memcheck", "racecheck"):
            report.absent(tool, why)
        return
    planted, said = sanitized(path, "memcheck", "planted")
    report.check("memcheck finds a planted write", planted, (">=", 1), note=said)
    for tool in ("memcheck", "racecheck"):
        errors, said = sanitized(path, tool, "launch")
        report.check(f"{tool}: errors in all kernels", errors, ("==", 0), note=said)


def sanitized(path: str, tool: str, program: str) -> tuple[int | None, str]:
    """Errors that the tool counted, and what it said of them; None if it did not get that far.

    Without PyTorch's own cache each tensor is an allocation, whose ends the tool knows.
    """
    line = [path, "--tool", tool, "--report-api-errors", "no", "--print-limit", "5"]
    done = run(command(line, program), 90, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    output = done.stdout + done.stderr
    found = SUMMARY.search(output)
    launched = program == "planted" or f"launched {len(OPS)}" in output
    if found is None or not launched:
        return None, f"return code {done.returncode}: {output.strip()[-TAIL:]}"
    errors = int(found[1])
    return errors, output.strip()[:TAIL] if errors and program == "launch" else ""


# -- Nsight Compute ----------------------------------------------------------------------------


def ncu(report: Report, device: torch.device) -> None:
    """The two largest kernels of all, and the largest of each op with a goal of its own."""
    if device.type != "cuda":
        report.absent("ncu", "no GPU")
        return
    kernels = kernel_times(report, device)
    chosen = kernels[:2]
    for op in OPS:
        if op.goal is not None and op.name.isidentifier():  # no variant of another
            chosen += [next(k for k in kernels if k[0] == op.name)]
    path = shutil.which("ncu")
    if path is None:
        report.absent("ncu", "not installed")
        return
    for op_name, kernel, _ in dict.fromkeys(chosen):
        rows, why = counters(path, op_name, kernel)
        if not rows:
            report.absent(f"ncu: {kernel} of {op_name}", why)
            continue
        for row in rows:
            report.row(f"ncu: {kernel} of {op_name}", **row)
        report.check(f"ncu: {kernel} of {op_name}: counters read", len(rows), (">=", 1))


def kernel_times(report: Report, device: torch.device) -> list[tuple[str, str, float]]:
    """Op, kernel and its milliseconds, the longest first, by PyTorch's profiler."""
    p = Problem(LARGE, device, report.seed, poison=False)
    found = []
    for op in OPS:
        op.launch(p)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            op.launch(p)
            torch.cuda.synchronize()
        for event in seen.key_averages():
            ms = event.self_device_time_total / 1e3
            if ms > 0:
                found.append((op.name, event.key, ms))
    found.sort(key=lambda kernel: -kernel[2])
    for op_name, kernel, ms in found:
        report.row("kernels by time, 8k tokens, 32 layers", op=op_name, kernel=kernel, ms=ms)
    return [kernel for kernel in found if kernel[1].isidentifier()]  # Triton's, not PyTorch's


def counters(path: str, op_name: str, kernel: str) -> tuple[list[dict[str, str]], str]:
    """What ncu says of a kernel's first launch; empty with the reason if it may not."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        line = [path, "--set", "full", "--clock-control", "none", "--profile-from-start", "off"]
        line += ["--kernel-name", f"regex:^{kernel}$", "--launch-count", "1"]
        line += ["--csv", "--page", "details", "--log-file", str(log)]
        done = run(command(line, "profile", op_name), 120)
        text = log.read_text() if log.exists() else ""
    rows = details(text)
    return rows, f"return code {done.returncode}: {(text + done.stdout + done.stderr)[-TAIL:]}"


def details(text: str) -> list[dict[str, str]]:
    """Metrics of `SECTIONS` and all rules of ncu's CSV."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = []
    for row in csv.DictReader(lines):
        section = row.get("Section Name", "")
        if row.get("Rule Description"):
            said = {"metric": row.get("Rule Name", ""), "value": row["Rule Description"][:500]}
            rows.append({"section": section, **said, "unit": row.get("Rule Type", "")})
        elif section in SECTIONS and row.get("Metric Name"):
            said = {"metric": row["Metric Name"], "value": row.get("Metric Value", "")}
            rows.append({"section": section, **said, "unit": row.get("Metric Unit", "")})
    return rows


# -- the programs ------------------------------------------------------------------------------


def by_name(name: str) -> Op:
    return next(op for op in OPS if op.name == name)


def main(program: str, *args: str) -> None:
    device = torch.device("cuda")
    if program == "profile":
        p = Problem(LARGE, device, 0, poison=False)
    else:  # made on the CPU: what is checked are our kernels
        p = Problem(SMALL, torch.device("cpu"), 0, poison=False)
        p.move(device)
    if program == "planted":
        p.destination += 10_000
        by_name("compact").launch(p)
    elif program == "profile":
        op = by_name(args[0])
        op.launch(p)
        torch.cuda.synchronize()
        cudart: Any = torch.cuda.cudart()
        cudart.cudaProfilerStart()
        op.launch(p)
        torch.cuda.synchronize()
        cudart.cudaProfilerStop()
    else:
        for op in OPS:
            op.launch(p)
            torch.cuda.synchronize()
        print(f"launched {len(OPS)}")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
