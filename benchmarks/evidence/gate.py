"""Check the quality of the recommended preset against recorded floors: `make gate`.

    python -m benchmarks.evidence.gate               # twenty minutes
    python -m benchmarks.evidence.gate --short       # the size that the tests run
    python -m benchmarks.evidence.gate --write       # measure and write new floors

The prompts never change, so only code changes the results. Two groups of prompts are measured:

* Needles: hidden facts. The preset runs without its look-ahead, because most outputs name the fact
  within a look-ahead, before the prompt is compressed.
* Ordinary requests: the preset as it is, from the first token that may read a compressed prompt.

A floor is the lower end of the 95 % interval that was measured when it was written. A KL ceiling is
the upper end. In each group a worse baseline must fail: `random` for needles, and the preset
without its look-ahead for ordinary requests. Floors that such a baseline passes would catch
nothing.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.evidence.__main__ import measure, parse_methods, prefill_items
from benchmarks.evidence.cells import ALL, ORDINARY, Cell, cells
from benchmarks.evidence.reference_model import ReferenceModel
from benchmarks.evidence.variants import WITHOUT_LOOKAHEAD
from vllm_kvcompress.compare.statistics import Estimate
from vllm_kvcompress.compare.tasks import ORDINARY as INSTRUCTIONS
from vllm_kvcompress.compare.tasks import Item, QuestionAt, build_items
from vllm_kvcompress.methods.presets import RECOMMENDED

FLOORS = Path(__file__).with_name("floors.json")
POSITIONS = "from 33"
"""Range of output tokens to check: it starts after the preset's look-ahead."""
SLACK = 1.25
"""Factor on the losses that ordinary requests may show.

Processors round differently. Where two tokens are nearly equally likely, a long output can continue
in other words.
"""
NEEDLES, REQUESTS = "needles", "requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The prompts and budgets of one gate size.

    Args:
        tasks: tasks with expected answers, from TASKS.
        tokens: maximum prompt length in tokens.
        texts: number of texts per task.
        per_text: number of questions per text.
        budgets: budgets to check. Short prompts keep very few tokens at a small budget.
        instructions: tasks of ordinary requests.
        requests: requests per such task; half of them have the question before the text.
    """

    tasks: tuple[str, ...]
    tokens: int
    texts: int
    per_text: int
    budgets: tuple[float, ...]
    instructions: tuple[str, ...]
    requests: int


SIZES = {
    "full": Size(
        tasks=("niah-multikey-1", "niah-multiquery"),
        tokens=2200,
        texts=12,
        per_text=3,
        budgets=(0.2, 0.1),
        instructions=tuple(INSTRUCTIONS),
        requests=4,
    ),
    "short": Size(
        tasks=("niah-multikey-1",),
        tokens=1100,
        texts=3,
        per_text=4,
        budgets=(0.3, 0.2),
        instructions=("explain",),
        requests=2,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """Prompts that are checked together.

    Args:
        method: the method that must pass.
        baseline: a worse method that must fail.
        baseline_fails: the floor that the baseline must miss.
        task: name of the cell over all prompts of the group.
    """

    method: str
    baseline: str
    baseline_fails: Literal["share", "kl"]
    task: str


GROUPS: Mapping[str, PromptGroup] = {
    NEEDLES: PromptGroup(
        method=WITHOUT_LOOKAHEAD, baseline="random", baseline_fails="share", task=ALL
    ),
    REQUESTS: PromptGroup(
        method=RECOMMENDED, baseline=WITHOUT_LOOKAHEAD, baseline_fails="kl", task=ORDINARY
    ),
}
MeasuredCells = Mapping[str, Mapping[tuple[str, float], Cell]]
"""Cells by group name, then by method and budget."""
Floors = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By group name and budget: the minimum "share" and the maximum "kl"."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--short", action="store_true", help="use fewer and shorter prompts")
    parser.add_argument("--write", action="store_true", help="measure and write new floors")
    args = parser.parse_args(argv)
    size = "short" if args.short else "full"
    found = measure_cells(ReferenceModel(args.model), Path(args.model).name, SIZES[size])
    floors = json.loads(FLOORS.read_text()) if FLOORS.exists() else {}
    if args.write:
        floors[size] = {
            name: {
                str(budget): floor_of(cell)
                for (method, budget), cell in found[name].items()
                if method == group.method
            }
            for name, group in GROUPS.items()
        }
        FLOORS.write_text(json.dumps(floors, indent=2) + "\n")
    faults = check(found, floors[size])
    Console().print(table(found, floors[size]))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def measure_cells(model: ReferenceModel, model_name: str, size: Size) -> MeasuredCells:
    """Return the cells of each group's method and baseline."""
    return {name: _measure_group(model, model_name, size, name) for name in GROUPS}


def _measure_group(
    model: ReferenceModel, model_name: str, size: Size, name: str
) -> Mapping[tuple[str, float], Cell]:
    group = GROUPS[name]
    methods = parse_methods([group.method, group.baseline])
    pending = [(method, budget) for method in methods for budget in size.budgets]
    results: list[dict[str, Any]] = []
    # One value of "question" for both positions, so that they share a cell.
    prompts = {"model": model_name, "question": "", "tokens": size.tokens}
    for seed, items in enumerate(_items(model, size, name), 1):
        for item, prompt in prefill_items(model, items, lambda _: True, with_column_sums=False):
            for line in measure(model, item, prompt, pending, methods, decode_fully=False):
                results.append(
                    {**prompts, "seed": seed, "task": item.task, "group": item.group, **line}
                )
    return {(c.method, c.budget): c for c in cells(results) if c.task == group.task}


def _items(model: ReferenceModel, size: Size, name: str) -> Iterator[list[Item]]:
    """Yield the prompts of a group, one list per question position."""
    if name == NEEDLES:
        yield build_items(
            size.tasks,
            count=size.texts * size.per_text,
            tokens=size.tokens,
            seed=1,
            question="last",
            count_tokens=model.count_tokens,
            questions_per_text=size.per_text,
        )
        return
    positions: Sequence[QuestionAt] = ("first", "last")
    for seed, position in enumerate(positions, 1):
        yield build_items(
            size.instructions,
            count=size.requests // 2,
            tokens=size.tokens,
            seed=seed,
            question=position,
            count_tokens=model.count_tokens,
            questions_per_text=1,
        )


class GatedFigures(NamedTuple):
    """The two figures of a cell that have floors."""

    share: Estimate
    """Needles: share of the full cache's score. Ordinary requests: share of equal tokens."""
    kl: Estimate
    """Nats per token; for ordinary requests, only within `POSITIONS`."""


def gated_figures(cell: Cell) -> GatedFigures:
    if cell.score is None:
        return GatedFigures(cell.along[POSITIONS].top1, cell.along[POSITIONS].kl)
    assert cell.kl is not None
    return GatedFigures(cell.score, cell.kl)


def floor_of(cell: Cell) -> dict[str, float]:
    """Return the floor and ceiling of a cell: interval ends, with `SLACK` for ordinary requests."""
    share, kl = gated_figures(cell)
    slack = SLACK if cell.score is None else 1.0
    return {"share": round(1 - slack * (1 - share.low), 4), "kl": round(slack * kl.high, 4)}


def check(found: MeasuredCells, floors: Floors) -> list[str]:
    """Return one sentence per failed check."""
    faults = []
    for name, group in GROUPS.items():
        for budget, floor in ((float(key), floor) for key, floor in floors[name].items()):
            method = gated_figures(found[name][group.method, budget])
            baseline = gated_figures(found[name][group.baseline, budget])
            if method.share.mean < floor["share"]:
                faults.append(
                    f"{name}: {group.method} at {budget} must reach a share of at least"
                    f" {floor['share']:.1%} of the full cache, got {method.share.mean:.1%}"
                )
            if method.kl.mean > floor["kl"]:
                faults.append(
                    f"{name}: {group.method} at {budget} must have a KL of at most {floor['kl']}"
                    f" nats per token from the full cache, got {method.kl.mean:.4f}"
                )
            passes = {
                "share": baseline.share.mean >= floor["share"],
                "kl": baseline.kl.mean <= floor["kl"],
            }
            if passes[group.baseline_fails]:
                faults.append(
                    f"{name}: the floors at {budget}, {floor['share']:.1%} and {floor['kl']} nats,"
                    f" would let {group.baseline} pass with {baseline.share.mean:.1%} and"
                    f" {baseline.kl.mean:.4f} nats: use more or harder prompts"
                )
    return faults


def table(found: MeasuredCells, floors: Floors) -> Table:
    """Return a table of all cells with their floors."""
    report = Table(
        "prompts", "method", "budget", "share", "low", "floor", "KL", "high", "ceiling", "number"
    )
    for name, cells_of_group in found.items():
        for (method, budget), cell in cells_of_group.items():
            share, kl = gated_figures(cell)
            floor = floors[name][str(budget)] if method == GROUPS[name].method else None
            report.add_row(
                name,
                method,
                f"{budget:g}",
                f"{share.mean:.1%}",
                f"{share.low:.1%}",
                f"{floor['share']:.1%}" if floor else "",
                f"{kl.mean:.3f}",
                f"{kl.high:.3f}",
                f"{floor['kl']:.3f}" if floor else "",
                str(cell.same.prompts),
            )
    return report


if __name__ == "__main__":
    sys.exit(main())
