"""Everything that is measured on a GPU, in one command; results are files in a folder.

    python -m benchmarks.gpu --out DIR [--stages correctness kernels ...] [--seconds 1200]

A stage that is complete in DIR, by the same commit, is not run again; one that was interrupted
starts again. To measure a stage anew, delete ``DIR/<stage>.json``. ``summary.md`` and
``summary.json`` hold all stages of the folder and are written after each of them and whenever the
run stops; ``log.txt`` holds what the stages wrote beside. The exit status is 1 when a check failed
or a stage did not finish.

``--dry-run`` goes through the same code on a CPU, with small sizes and Triton's interpreter: what
is right is judged, times are not, and every file says that it is dry.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.report import FAIL
from benchmarks.gpu.stages import LIMITS, Order, Origin, complete, run_inside, run_stage
from benchmarks.gpu.summary import conclude, write
from benchmarks.origin import commit

DRY = 6  # times as long may a dry run take
LOG_BYTES = 8 << 20  # of log.txt, its end
LEAST = 10  # seconds that are worth starting a stage for


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--stages", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    parser.add_argument(
        "--seconds", type=float, default=sum(LIMITS.values()), help="of this run (%(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="on a CPU; nothing is measured")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the random data")
    parser.add_argument("--commit", help="where the code came from, on a machine without git")
    parser.add_argument("--summary", action="store_true", help="of what is in DIR; run nothing")
    parser.add_argument("--inside", choices=list(LIMITS), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    order = Order(args.out, Origin(args.commit or commit(), args.dry_run), args.seed)
    if args.inside:
        run_inside(order, args.inside)
        return 0
    faults: list[str] = []
    args.out.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, interrupted)
    try:
        if not args.summary:
            run(order, args.stages, args.seconds, faults)
    except KeyboardInterrupt:
        faults.append(f"{FAIL:6} the run was interrupted; the same command goes on with it")
    finally:
        signal.signal(signal.SIGTERM, before)
    keep_end(args.out / "log.txt", LOG_BYTES)
    return conclude(args.out, args.stages, faults)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def run(order: Order, stages: Sequence[str], seconds: float, faults: list[str]) -> None:
    """The stages that are asked for and not complete, one after the other."""
    patience = DRY if order.origin.dry else 1
    begun = time.monotonic()
    with (order.out / "log.txt").open("a") as log:
        for stage in (name for name in LIMITS if name in stages):
            if complete(order.out, stage, order.origin):
                print(f"       {stage}: complete already", flush=True)
                continue
            (order.out / f"{stage}.json").unlink(missing_ok=True)
            left = patience * seconds - (time.monotonic() - begun)
            start = time.monotonic()
            why: str | None = "no time was left for it"
            if left >= LEAST:
                why = run_stage(order, stage, min(patience * LIMITS[stage], left), log)
                print(f"       {stage}: {time.monotonic() - start:.0f} s", flush=True)
            if why is not None:
                faults.append(f"{FAIL:6} {stage}: {why}")
                print(faults[-1], flush=True)
            write(order.out, faults)


def keep_end(path: Path, size: int) -> None:
    """Cut a file down to its last `size` bytes."""
    content = path.read_bytes() if path.exists() else b""
    if len(content) > size:
        path.write_bytes(content[-size:])


if __name__ == "__main__":
    sys.exit(main())
