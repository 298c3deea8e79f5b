"""Everything that is measured on an H200, in one command; results are files in `--out`.

    python benchmarks/h200.py --out results [--stage correctness speed ...] [--dry-run]

Each stage is a process of its own with a time limit of its own, so that what fails late leaves what
was found early. A stage writes ``<stage>.json`` as it goes; ``summary.md`` holds all stages in
the folder, also those of earlier commands, and ``log.txt`` what they wrote beside. One line is
printed for each check; the exit status is 1 when a check failed or a stage did not finish.

``--dry-run`` goes through the same code on a CPU, with small sizes and Triton's interpreter: what
is right is judged, times are not, and every file says that it is dry.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from h200_report import FAIL, Report, failures, stages, summary

LIMITS = {  # seconds, in the order of the run
    "correctness": 340,
    "speed": 300,
    "sanitizer": 300,
    "engine": 360,
    "serving": 560,
    "ncu": 240,
}
DRY = 6  # times as long may a dry run take
LOG_BYTES = 8 << 20  # of log.txt, its end


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--stage", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    parser.add_argument("--summary", action="store_true", help="of what is in --out; run nothing")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU; nothing is measured")
    parser.add_argument(
        "--limit", type=float, default=sum(LIMITS.values()), help="seconds for all stages"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the random data")
    parser.add_argument("--commit", help="where the code came from, on a machine without git")
    parser.add_argument("--inside", choices=list(LIMITS), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run_inside(args: argparse.Namespace) -> None:
    """One stage, in this process."""
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        raise SystemExit("there is no GPU; add --dry-run")
    device = torch.device("cpu" if args.dry_run else "cuda")
    report = Report(args.inside, args.out, args.dry_run, args.seed, args.commit)
    if args.inside == "correctness":
        from h200_kernels import correctness as stage
    elif args.inside == "speed":
        from h200_speed import speed as stage
    elif args.inside == "sanitizer":
        from h200_tools import sanitizer as stage
    elif args.inside == "engine":
        from h200_engine import engine as stage
    elif args.inside == "serving":
        from h200_serving import serving as stage
    else:
        from h200_tools import ncu as stage
    stage(report, device)
    report.finish()


def environment(name: str, *, dry: bool) -> dict[str, str]:
    """Of a stage's process; its packages are those of this checkout unless others are installed."""
    root = Path(__file__).parents[1]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = {**os.environ, "PYTHONUNBUFFERED": "1"}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [*given, str(root), str(root / "kernels")]))
    if dry and name in ("correctness", "speed"):
        found["TRITON_INTERPRET"] = "1"
    if dry:
        found.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    return found


def run_stage(name: str, args: argparse.Namespace, seconds: float, log: TextIO) -> str | None:
    """One stage in a process of its own; why it ended before its end, if it did.

    A stage that overruns is ended with all that it started.
    """
    line = [sys.executable, str(Path(__file__)), "--inside", name, "--out", str(args.out)]
    line += ["--seed", str(args.seed)]
    line += ["--dry-run"] if args.dry_run else []
    line += ["--commit", args.commit] if args.commit else []
    log.write(f"\n==== {name}\n")
    log.flush()
    process = subprocess.Popen(
        line, stderr=log, env=environment(name, dry=args.dry_run), start_new_session=True
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


def keep_end(path: Path, size: int) -> None:
    """Cut a file down to its last `size` bytes."""
    content = path.read_bytes()
    if len(content) > size:
        path.write_bytes(content[-size:])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.inside:
        run_inside(args)
        return 0
    if args.summary:
        return conclude(args.out, args.stage, [])
    args.out.mkdir(parents=True, exist_ok=True)
    begun, wrong, patience = time.monotonic(), [], DRY if args.dry_run else 1
    with (args.out / "log.txt").open("a") as log:
        for name in (stage for stage in LIMITS if stage in args.stage):
            (args.out / f"{name}.json").unlink(missing_ok=True)
            left = patience * args.limit - (time.monotonic() - begun)
            if left < 10:
                why: str | None = "no time was left for it"
            else:
                start = time.monotonic()
                why = run_stage(name, args, min(patience * LIMITS[name], left), log)
                print(f"       {name}: {time.monotonic() - start:.0f} s", flush=True)
            if why is not None:
                wrong.append(f"{FAIL:6} {name}: {why}")
                print(wrong[-1], flush=True)
    keep_end(args.out / "log.txt", LOG_BYTES)
    return conclude(args.out, args.stage, wrong)


def conclude(folder: Path, names: Sequence[str], wrong: Sequence[str]) -> int:
    """Write the summary of all that is in `folder`; judge the stages that were run."""
    (folder / "summary.md").write_text(summary(stages(folder, list(LIMITS))))
    found = stages(folder, names)
    faults = [*wrong, *failures(found)]
    checks = [check["result"] for stage in found for check in stage["checks"]]
    counts = ", ".join(f"{checks.count(kind)} {kind}" for kind in dict.fromkeys(checks))
    print("\n".join([f"{len(checks)} checks: {counts}", *faults]), flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
