"""Stage `server`: HTTP servers without and with the plugin, measured by ``vllm bench serve``.

Both servers stay up, and the client's runs alternate. The demo model is small, so times say what
the HTTP server and the scheduler cost, not what a large model gains.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.report import Report
from benchmarks.gpu.rounds import Figures, alternate, report_difference, report_rounds
from benchmarks.gpu.tokens import MODEL
from vllm_kvcompress.serving.process import Server, serve

FULL, PLUGIN = "full cache", "plugin"
COMPRESSION = ("--kv-compress", "cake-chunk", "--kv-budget", "0.2")
FIGURES = ("median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "output_throughput")
"""Figures of ``vllm bench serve`` that the report compares."""
PACKED = "vllm:kv_compress_requests_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Random requests that arrive at once, and the flags of the servers that get them."""

    requests: int
    prompt: int
    output: int
    rounds: int
    flags: tuple[str, ...]


LOAD = Load(
    requests=128,
    prompt=4096,
    output=128,
    rounds=5,
    flags=("--gpu-memory-utilization", "0.35", "--max-model-len", "8192"),
)
DRY_LOAD = Load(
    requests=2,
    prompt=1100,
    output=40,
    rounds=1,
    flags=("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "4"),
)


def run(report: Report, device: torch.device) -> None:
    if not (MODEL / "config.json").exists():
        report.failed("the demo model", f"{MODEL} is missing; run `make model`")
        return
    load = DRY_LOAD if report.dry else LOAD
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                serve(str(MODEL), [*load.flags, *flags], report.folder / f"server_{name[:4]}.log")
            )
            for name, flags in ((FULL, ()), (PLUGIN, COMPRESSION))
        }
        measure(report, load, servers)


def measure(report: Report, load: Load, servers: dict[str, Server]) -> None:
    """Run the client against all servers in alternating rounds, and compare its figures."""
    before = servers[PLUGIN].metric(PACKED)
    variants = {name: client(server.url, load, report.seed) for name, server in servers.items()}
    found = alternate(load.rounds, variants)
    workload = f"{load.requests} x {load.prompt} by HTTP"
    report_rounds(report, workload, found)
    for name, figures in found.items():
        complete = min(x["completed"] for x in figures)
        report.check(f"{workload}, {name}: completed", complete, ("==", load.requests))
    packed = servers[PLUGIN].metric(PACKED) - before
    report.check(f"{workload}: requests compressed", packed, (">=", load.requests * load.rounds))
    for figure in FIGURES:
        report_difference(report, workload, found, PLUGIN, FULL, figure)


def client(url: str, load: Load, seed: int) -> Callable[[int], Figures]:
    """Return a function that runs ``vllm bench serve`` for a round number."""

    def run_round(number: int) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            line = command(url, load, seed + number, Path(folder))
            subprocess.run(line, stdout=sys.stderr, check=True)
            figures: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return {name: figures[name] for name in ("completed", *FIGURES)}

    return run_round


def command(url: str, load: Load, seed: int, folder: Path) -> list[str]:
    """Return the client's command line. It writes ``result.json`` to the folder."""
    options = {
        "--base-url": url,
        "--model": str(MODEL),
        "--dataset-name": "random",
        "--random-input-len": load.prompt,
        "--random-output-len": load.output,
        "--num-prompts": load.requests,
        "--seed": seed,
        "--result-dir": folder,
        "--result-filename": "result.json",
    }
    vllm = str(Path(sys.executable).with_name("vllm"))
    pairs = [str(part) for pair in options.items() for part in pair]
    return [vllm, "bench", "serve", *pairs, "--ignore-eos", "--save-result", "--disable-tqdm"]
