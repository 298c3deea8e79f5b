"""The stages: each a process of its own with a time limit, so that what was found early is kept."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]
LIMITS = {  # seconds, in the order of the run: what is wrong must be known before it is timed
    "correctness": 900,
    "kernels": 400,
    "tokens": 500,
    "serving": 900,
}


@dataclass(frozen=True, slots=True)
class Origin:
    """What two runs must share for their results to stand side by side in one folder."""

    commit: str
    dry: bool


@dataclass(frozen=True, slots=True)
class Order:
    """What a run asks of its stages.

    Args:
        out: the folder of the results.
        seed: of the random data.
    """

    out: Path
    origin: Origin
    seed: int

    def arguments(self, stage: str) -> list[str]:
        """Of ``python -m benchmarks.gpu``, for the process of one stage."""
        line = ["--inside", stage, "--out", str(self.out), "--seed", str(self.seed)]
        line += ["--commit", self.origin.commit]
        return line + (["--dry-run"] if self.origin.dry else [])


def complete(folder: Path, stage: str, origin: Origin) -> bool:
    """Whether a stage came to its end here, with this code; checks that failed are results too."""
    path = folder / f"{stage}.json"
    if not path.exists():
        return False
    found: Mapping[str, object] = json.loads(path.read_text())
    return bool(found["finished"]) and Origin(str(found["commit"]), bool(found["dry"])) == origin


def run_inside(order: Order, stage: str) -> None:
    """One stage, in this process."""
    import torch

    from benchmarks.gpu import correctness, kernels, serving, tokens
    from benchmarks.gpu.machine import watched_clocks
    from benchmarks.gpu.report import Report

    dry = order.origin.dry
    if not dry and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; add --dry-run")
    modules = {
        "correctness": correctness,
        "kernels": kernels,
        "tokens": tokens,
        "serving": serving,
    }
    report = Report(stage, order.out, dry, order.origin.commit, order.seed)
    if dry and stage == "kernels":
        interpret()
    with watched_clocks(report):
        modules[stage].run(report, torch.device("cpu" if dry else "cuda"))
    report.finish()


def interpret() -> None:
    """Let the ops run Triton's interpreter on CPU tensors, as the tests do."""
    sys.path.append(str(ROOT / "tests"))
    import interpreter
    from kvcompress_kernels import contract

    interpreter.mend()
    contract.triton_takes = lambda tensor: True


def environment(stage: str, *, dry: bool) -> dict[str, str]:
    """Of a stage's process; its packages are those of this checkout unless others are installed."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = {**os.environ, "PYTHONUNBUFFERED": "1"}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [*given, str(ROOT), str(ROOT / "kernels")]))
    if dry and stage == "kernels":
        found["TRITON_INTERPRET"] = "1"
    if dry:
        found.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    return found


def command(order: Order, stage: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", *order.arguments(stage)]


def run_stage(order: Order, stage: str, seconds: float, log: TextIO) -> str | None:
    """One stage in a process of its own; why it ended before its end, if it did.

    Whatever ends this call ends the stage with all that it started.
    """
    line = command(order, stage)
    log.write(f"\n==== {stage}\n")
    log.flush()
    process = subprocess.Popen(
        line, stderr=log, env=environment(stage, dry=order.origin.dry), start_new_session=True
    )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        end_group(process)
    return f"ended with {code}" if code else None


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a stage's process and those it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
