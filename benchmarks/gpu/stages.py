"""Run each stage in its own process with a time limit, so that a failure loses no results."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]
STAGES = {  # seconds, and the function that takes the report and the device; in run order
    # first, because `kvcompress plan` depends on its times
    "packed-attention": (400, "packed.run"),
    "correctness": (900, "correctness.run"),
    "window-scores": (200, "kernels.run_window_scores"),
    "kernels": (400, "kernels.run"),
    "tokens": (500, "tokens.run"),
    "switches": (500, "serving.run_switches"),
    "long": (400, "serving.run_long"),
    "gaps": (400, "serving.run_gaps"),
    "idle": (400, "serving.run_idle"),
    "batches": (600, "serving.run_batches"),
    "drafts": (600, "drafts.run"),
    "server": (500, "server.run"),
}
LIMITS = {name: seconds for name, (seconds, _) in STAGES.items()}
KERNEL_STAGES = ("kernels", "window-scores", "packed-attention")


@dataclass(frozen=True, slots=True)
class Origin:
    """Two runs must share these values to have their results in one folder."""

    commit: str
    dry: bool


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run that all its stages share.

    Args:
        out: folder of the results.
        seed: seed of the random data.
    """

    out: Path
    origin: Origin
    seed: int

    def arguments(self, stage: str) -> list[str]:
        """Return the arguments of ``python -m benchmarks.gpu`` for one stage's process."""
        arguments = ["--inside", stage, "--out", str(self.out), "--seed", str(self.seed)]
        arguments += ["--commit", self.origin.commit]
        return arguments + (["--dry-run"] if self.origin.dry else [])


def complete(folder: Path, stage: str, origin: Origin) -> bool:
    """Return True if the folder has a finished stage of this commit, even with failed checks."""
    path = folder / f"{stage}.json"
    if not path.exists():
        return False
    found: Mapping[str, object] = json.loads(path.read_text())
    return bool(found["finished"]) and Origin(str(found["commit"]), bool(found["dry"])) == origin


def run_inside(options: RunOptions, stage: str) -> None:
    """Run one stage in this process."""
    import torch

    from benchmarks.gpu.machine import clocks_checked
    from benchmarks.gpu.report import Report

    dry = options.origin.dry
    if not dry and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device: add --dry-run")
    report = Report(stage, options.out, dry, options.origin.commit, options.seed)
    if dry and stage in KERNEL_STAGES:
        interpret()
    with clocks_checked(report):
        function(stage)(report, torch.device("cpu" if dry else "cuda"))
    report.finish()


def function(stage: str) -> Callable[..., None]:
    """Return the function of a stage; its module is imported only now."""
    module, _, name = STAGES[stage][1].partition(".")
    found: Callable[..., None] = getattr(import_module(f"benchmarks.gpu.{module}"), name)
    return found


def interpret() -> None:
    """Make ops, ours and vLLM's, run in Triton's interpreter on CPU tensors, as the tests do."""
    sys.path.append(str(ROOT / "tests"))
    import faster_interpreter
    import interpreter
    from kvcompress_kernels import contract

    interpreter.install_driver()
    interpreter.install_fixes()
    faster_interpreter.install_caches()
    contract.runs_triton = lambda tensor: True


def environment(stage: str, *, dry: bool) -> dict[str, str]:
    """Return the environment of a stage's process; it finds this checkout's packages."""
    python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(
        filter(None, [*python_path, str(ROOT), str(ROOT / "kernels")])
    )
    if dry and stage in KERNEL_STAGES:
        variables["TRITON_INTERPRET"] = "1"
    if dry:
        variables.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    return variables


def command(options: RunOptions, stage: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", *options.arguments(stage)]


def run_stage(options: RunOptions, stage: str, seconds: float, log: TextIO) -> str | None:
    """Run one stage in its own process; return the reason if it did not finish, or None.

    However this call ends, it kills the stage and all processes that the stage started.
    """
    arguments = command(options, stage)
    log.write(f"\n==== {stage}\n")
    log.flush()
    process = subprocess.Popen(
        arguments,
        stderr=log,
        env=environment(stage, dry=options.origin.dry),
        start_new_session=True,
    )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        end_group(process)
    return f"ended with {code}" if code else None


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a stage's process and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
