"""Stage `kernels`: every op's time as the engine launches it, beside its floor.

A prompt's time is that of all its layers, one launch after the other where the engine makes
several. The floor counts K once (`window_scores`), V once (`value_scores`), scores once
(`select`), kept pages read and written (`move_kept`); `column_sums` and `merge_evicted` are bound
by arithmetic. Nothing is timed unless what it gave is the reference's.
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.ops import OPS, Op, Outputs, wrong
from benchmarks.gpu.prompt import DecodeStep, Prompt, Shape
from benchmarks.gpu.report import Report
from benchmarks.gpu.timing import Ceilings, Clock, ceilings

LENGTHS = (8192, 32768, 131072)
SHARE = 0.5  # of the free memory, for the page pool
TINY: dict[str, Any] = {"heads": 2, "kv_heads": 1, "dim": 16, "block": 8, "window": 4, "chunk": 12}
DRY = Shape(layers=3, tokens=44, longest=90, budget=0.3, decoding=5, **TINY)


def shapes(device: torch.device, *, dry: bool) -> list[Shape]:
    if dry:
        return [DRY]
    free, _ = torch.cuda.mem_get_info(device)
    return [fitting(Shape(tokens=tokens), int(SHARE * free)) for tokens in LENGTHS]


def fitting(shape: Shape, memory: int) -> Shape:
    """`shape` with as many layers, up to its own, as fit into so many bytes."""
    while shape.layers > 1 and shape.bytes > memory:
        shape = replace(shape, layers=shape.layers // 2)
    return shape


def launch(op: Op, work: Prompt | DecodeStep, launches: Sequence[range]) -> list[Outputs]:
    return [op.launch(work, layers) for layers in launches]


def run(report: Report, device: torch.device) -> None:
    clock = Clock(device)
    rates = ceilings(report, clock, device)
    for shape in shapes(device, dry=report.dry):
        works = {kind: kind(shape, device, report.seed) for kind in (Prompt, DecodeStep)}
        for op in OPS:
            title = f"{op.name}, {shape.tokens} tokens"
            try:
                measure_op(report, clock, rates, op, works[op.of], shape, title)
            except Exception as e:  # the other ops may still be timed
                report.failed(title, f"{type(e).__name__}: {str(e).strip()[-300:]}")
        del works
        gc.collect()
        if clock.cuda:
            torch.cuda.empty_cache()


def measure_op(
    report: Report,
    clock: Clock,
    rates: Ceilings,
    op: Op,
    work: Prompt | DecodeStep,
    shape: Shape,
    title: str,
) -> None:
    launches = op.launches(shape)
    shares = []
    for layers in launches[:1] + launches[1:][-1:]:
        got = op.launch(work, layers)
        got = op.left(work) if op.left else got
        shares.append(wrong(op, got, op.plain(work, layers)))
        del got
    report.check(f"{title}: share unlike the reference", max(shares), ("<=", op.undecided))
    if max(shares) > op.undecided:
        return
    launch_ms = clock.time(lambda: op.launch(work, launches[0]), seconds=0.1).ms
    prompt = clock.time(lambda: launch(op, work, launches))
    plain = clock.time(lambda: op.plain(work, launches[0]), seconds=0.05, least=1)
    floor = rates.floor_ms(op.floor_bytes(shape), op.floor_flops(shape))
    report.row(
        "ops as the engine launches them",
        op=op.name,
        tokens=shape.tokens,
        layers=shape.layers,
        launches=len(launches),
        launch_ms=launch_ms,
        prompt_ms=prompt.ms,
        fastest=prompt.fastest,
        slowest=prompt.slowest,
        runs=prompt.runs,
        host_ms=prompt.host_ms,
        floor_ms=floor,
        floor="arithmetic" if op.floor_flops(shape) else "bytes",
        of_floor=floor / prompt.ms,
        reference_ms=plain.ms * len(launches),
        reference_over_triton=plain.ms * len(launches) / prompt.ms,
    )
    if op.goal is not None:
        name = f"{title}: floor over time of all layers"
        report.check(name, floor / prompt.ms, (">=", op.goal), measured=True)
