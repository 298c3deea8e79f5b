"""Run GPU benchmarks in one command per stage, or all in one; results are files in a folder.

    python -m benchmarks.gpu [correctness kernels ...] --out DIR [--again] [--seconds 1200]

A stage that already completed in DIR at the same commit is skipped, unless ``--again`` repeats it.
An interrupted stage starts again. Each stage writes ``DIR/<stage>.json``. ``summary.md`` and
``summary.json`` cover all stages of the folder and are written after each stage and whenever the
run stops. ``log.txt`` has the stages' stderr. The exit status is 1 if a check failed or a stage did
not finish.

``--dry-run`` runs the same code on a CPU with small sizes and Triton's interpreter. It checks
correctness but not times, and every result file says that it is dry.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.report import FAIL
from benchmarks.gpu.stages import LIMITS, Origin, RunOptions, complete, run_inside, run_stage
from benchmarks.gpu.summary import conclude, write
from benchmarks.origin import commit

DRY_TIME_FACTOR = 6  # a dry run may take this many times longer
LOG_BYTES = 8 << 20  # log.txt keeps this much of its end
MIN_STAGE_SECONDS = 10  # with less time left, no stage starts


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"one of {', '.join(LIMITS)} (default: all)"
    )
    parser.add_argument("--again", action="store_true", help="repeat stages that completed")
    parser.add_argument(
        "--seconds",
        type=float,
        default=sum(LIMITS.values()),
        help="time limit in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check the code on a CPU; times mean nothing"
    )
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="seed of the random data"
    )
    parser.add_argument("--commit", help="commit of the code, on a machine without git")
    parser.add_argument("--summary", action="store_true", help="only write the summary of DIR")
    parser.add_argument("--inside", choices=list(LIMITS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.stages if name not in LIMITS]:
        parser.error(f"unknown stages {unknown}; known are {', '.join(LIMITS)}")
    args.stages = args.stages or list(LIMITS)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    options = RunOptions(args.out, Origin(args.commit or commit(), args.dry_run), args.seed)
    if args.inside:
        run_inside(options, args.inside)
        return 0
    faults: list[str] = []
    args.out.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, interrupted)
    try:
        if not args.summary:
            run(options, args.stages, args.seconds, faults, again=args.again)
    except KeyboardInterrupt:
        faults.append(f"{FAIL:6} the run was interrupted; run the same command to continue")
    finally:
        signal.signal(signal.SIGTERM, before)
    keep_end(args.out / "log.txt", LOG_BYTES)
    return conclude(args.out, args.stages, faults)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def run(
    options: RunOptions, stages: Sequence[str], seconds: float, faults: list[str], *, again: bool
) -> None:
    """Run the requested stages that are not complete yet, or all of them with `again`."""
    time_factor = DRY_TIME_FACTOR if options.origin.dry else 1
    run_start = time.monotonic()
    with (options.out / "log.txt").open("a") as log:
        for stage in (name for name in LIMITS if name in stages):
            if not again and complete(options.out, stage, options.origin):
                print(f"       {stage}: already complete", flush=True)
                continue
            (options.out / f"{stage}.json").unlink(missing_ok=True)
            seconds_left = time_factor * seconds - (time.monotonic() - run_start)
            start = time.monotonic()
            reason: str | None = "no time was left for it"
            if seconds_left >= MIN_STAGE_SECONDS:
                reason = run_stage(
                    options, stage, min(time_factor * LIMITS[stage], seconds_left), log
                )
                print(f"       {stage}: {time.monotonic() - start:.0f} s", flush=True)
            if reason is not None:
                faults.append(f"{FAIL:6} {stage}: {reason}")
                print(faults[-1], flush=True)
            write(options.out, faults)


def keep_end(path: Path, size: int) -> None:
    """Cut a file down to its last `size` bytes."""
    content = path.read_bytes() if path.exists() else b""
    if len(content) > size:
        path.write_bytes(content[-size:])


if __name__ == "__main__":
    sys.exit(main())
