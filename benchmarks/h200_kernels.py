"""Stage `correctness`: every kernel against its float64 truth, on random data of this run.

Memory that a kernel gets unwritten is poisoned, what it must not read is NaN, every launch is made
twice and must give the same bits, and so must the public op on each row alone.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from h200_ops import OPS, Op
from h200_problem import Problem, Shape
from h200_report import Report
from h200_truths import Outputs

TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ROWS = 8  # of a problem, compared at most


def cases(dry: bool) -> dict[str, Shape]:
    """By name; the first one is what the sanitizer sees."""
    if dry:
        small = {"heads": 4, "kv_heads": 2, "dim": 16, "window": 8, "chunk": 40, "budget": 0.4}
        return {
            "small": Shape(layers=1, requests=2, tokens=90, ragged=True, **small),
            "float32, heads first": Shape(
                layers=2,
                requests=1,
                tokens=70,
                dtype=torch.float32,
                token_major=False,
                ragged=True,
                **small,
            ),
        }
    demo = {"heads": 9, "kv_heads": 3, "dim": 64, "ragged": True}  # the demo model's heads
    return {
        "8B": Shape(layers=2, requests=3, tokens=1111, chunk=300, ragged=True),
        "8B, heads first": Shape(layers=2, requests=2, tokens=777, token_major=False, ragged=True),
        "demo, float16": Shape(layers=3, requests=2, tokens=1500, dtype=torch.float16, **demo),
        "demo, float32": Shape(
            layers=2, requests=2, tokens=600, block=32, dtype=torch.float32, **demo
        ),
        "D 80, window 8": Shape(
            layers=2, requests=2, tokens=500, heads=8, kv_heads=2, dim=80, window=8, ragged=True
        ),
        "128k": Shape(layers=1, requests=1, tokens=131072, chunk=256, budget=0.01),
        "beyond 2**31": Shape(layers=2, requests=1, tokens=4000, spare=2**31 // 2**15 + 100),
    }


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN, or the largest integer, instead of what lay there."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def interpreted() -> None:
    """Let the public ops run Triton's interpreter on CPU tensors, as the tests do."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import interpreter
    from kvcompress_kernels import contract

    interpreter.mend()
    contract.triton_takes = lambda tensor: True


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest deviation as a share of what is tolerated; elements of NaN in `want` are ignored.

    What `got` has beyond the shape of `want` belongs to longer prompts: see `beyond`.
    """
    got = got[tuple(slice(0, size) for size in want.shape)].double()
    want = want.double()
    if got.shape != want.shape:
        return float("inf")
    judged = ~want.isnan()
    off = (got - want).abs() / (TOLERANCE["atol"] + TOLERANCE["rtol"] * want.abs())
    worst = off[judged].nan_to_num(nan=float("inf"))
    return float(worst.max()) if len(worst) else 0.0


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(INTS[a.itemsize]), b.view(INTS[b.itemsize]))


def beyond(got: torch.Tensor, want: torch.Tensor, blank: float) -> bool:
    """Whether all that a shorter prompt does not have is `blank`."""
    rest = torch.ones_like(got, dtype=torch.bool)
    rest[tuple(slice(0, size) for size in want.shape)] = False
    return bool((got[rest] == blank).all())


def judge(op: Op, p: Problem) -> tuple[float, str]:
    """Worst error of an op's outputs over its tolerance, and what else is wrong with it."""
    faults = []
    with poisoned_memory():
        before = p.pool.clone() if op.left else None
        first = launch(op, p)
        first = {name: x.clone() for name, x in first.items()}
        again = launch(op, p)
    if p.device.type == "cuda":
        torch.cuda.synchronize()
    if not all(same_bits(first[name], again[name]) for name in first):
        faults.append("a second launch gave other bits")
    if before is not None and not untouched(p, before):
        faults.append("it wrote beside its pages")
    worst = 0.0
    for row in range(min(op.rows(p.shape), ROWS)):
        wanted = op.truth(p, row)
        for name in first.keys() & wanted.keys():
            got, want = first[name][row], wanted[name]
            worst = max(worst, error(got, want))
            if op.blank is not None and not beyond(got, want, op.blank):
                faults.append(f"{name} of row {row} is not blank behind its prompt")
        for name, alone in op.alone(p, row).items():
            part = first[name][row][tuple(slice(0, size) for size in alone.shape)]
            if alone.numel() and not same_bits(alone, part):
                faults.append(f"{name} of row {row} alone has other bits")
    return worst, "; ".join(faults[:3])


def launch(op: Op, p: Problem) -> Outputs:
    return {**op.launch(p), **(op.left(p) if op.left else {})}


def untouched(p: Problem, before: torch.Tensor) -> bool:
    """Whether `p.pool` is `before` but for the pages that were to be written."""
    for row, count in enumerate(p.counts.tolist()):
        pages = p.destination[row, :count]
        before[pages] = p.pool[pages]
    return same_bits(before, p.pool)


def correctness(report: Report, device: torch.device) -> None:
    interpreted()
    for number, (name, shape) in enumerate(cases(report.dry).items()):
        p = Problem(shape, device, report.seed + number, poison=True)
        for op in OPS:
            title = f"{op.name}, {name}: error over tolerance"
            try:
                worst, faults = judge(op, p)
            except Exception as e:  # whatever a compiler or a launch says: the next op may work
                report.failed(title, f"{type(e).__name__}: {str(e).strip()[-300:]}")
                continue
            report.check(title, float("inf") if faults else worst, ("<=", 1.0), note=faults)
        del p
