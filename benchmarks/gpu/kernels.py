"""Stages `kernels` and `window-scores`: times of ops as the engine launches them, and floors.

A prompt's time covers all its layers. If the engine needs several launches for them, they run one
after the other. The memory floor counts K once (`window_scores`), V once (`value_scores`), scores
once (`select`), or kept pages read and written (`move_kept`). `column_sums` and `merge_evicted` are
bound by arithmetic. An op is timed only if its outputs match the reference.
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.ops import OPS, Op, Tensors, mismatch
from benchmarks.gpu.prompt import DecodeStep, Prompt, Shape
from benchmarks.gpu.report import Report
from benchmarks.gpu.timing import Ceilings, Clock, ceilings

LENGTHS = (8192, 32768, 131072)
POOL_SHARE = 0.5  # share of the free memory that the page pool takes
TINY: dict[str, Any] = {"heads": 2, "kv_heads": 1, "dim": 16, "block": 8, "window": 4, "chunk": 12}
DRY = Shape(layers=3, tokens=44, longest=90, budget=0.3, decoding=5, **TINY)


def shapes(device: torch.device, *, dry: bool) -> list[Shape]:
    if dry:
        return [DRY]
    free, _ = torch.cuda.mem_get_info(device)
    return [fit_layers(Shape(tokens=tokens), int(POOL_SHARE * free)) for tokens in LENGTHS]


def fit_layers(shape: Shape, memory: int) -> Shape:
    """Return `shape` with its layers halved until they fit into `memory` bytes."""
    while shape.layers > 1 and shape.bytes > memory:
        shape = replace(shape, layers=shape.layers // 2)
    return shape


def launch(op: Op, inputs: Prompt | DecodeStep, launches: Sequence[range]) -> list[Tensors]:
    return [op.launch(inputs, layers) for layers in launches]


def run(report: Report, device: torch.device) -> None:
    measure(report, device, OPS, shapes(device, dry=report.dry))


def run_window_scores(report: Report, device: torch.device) -> None:
    """Measure the window scores alone, whose passes take most of a compression."""
    ops = [op for op in OPS if op.name.startswith("window_scores")]
    measure(report, device, ops, shapes(device, dry=report.dry)[:2])


def measure(
    report: Report, device: torch.device, ops: Sequence[Op], op_shapes: Sequence[Shape]
) -> None:
    """Measure ops with prompts of these shapes, after the GPU's own rates."""
    clock = Clock(device)
    rates = ceilings(report, clock, device)
    for shape in op_shapes:
        inputs_by_kind = {kind: kind(shape, device, report.seed) for kind in (Prompt, DecodeStep)}
        for op in ops:
            title = f"{op.name}, {shape.tokens} tokens"
            try:
                measure_op(report, clock, rates, op, inputs_by_kind[op.inputs], shape, title)
            except Exception as e:  # time the other ops
                report.failed(title, f"{type(e).__name__}: {str(e).strip()[-300:]}")
        del inputs_by_kind
        gc.collect()
        if clock.cuda:
            torch.cuda.empty_cache()


def measure_op(
    report: Report,
    clock: Clock,
    rates: Ceilings,
    op: Op,
    inputs: Prompt | DecodeStep,
    shape: Shape,
    title: str,
) -> None:
    launches = op.launches(shape)
    mismatches = []
    for layers in launches[:1] + launches[1:][-1:]:
        got = op.launch(inputs, layers)
        got = op.read_outputs(inputs) if op.read_outputs else got
        mismatches.append(mismatch(op, got, op.reference(inputs, layers)))
        del got
    report.check(
        f"{title}: share of outputs unlike the reference", max(mismatches), ("<=", op.tie_share)
    )
    if max(mismatches) > op.tie_share:
        return
    launch_ms = clock.time(lambda: op.launch(inputs, launches[0]), seconds=0.1).ms
    prompt = clock.time(lambda: launch(op, inputs, launches))
    reference = clock.time(lambda: op.reference(inputs, launches[0]), seconds=0.05, min_runs=1)
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
        reference_ms=reference.ms * len(launches),
        reference_over_triton=reference.ms * len(launches) / prompt.ms,
    )
    if op.goal is not None:
        name = f"{title}: floor over time of all layers"
        report.check(name, floor / prompt.ms, (">=", op.goal), measured=True)
