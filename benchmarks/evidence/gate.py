"""Check the quality of the recommended settings against recorded floors: `make gate`.

    python -m benchmarks.evidence.gate               # under ten minutes on two quiet cores
    python -m benchmarks.evidence.gate --short       # the size that the tests run
    python -m benchmarks.evidence.gate --write       # measure and write new floors

The settings are the recommended preset's: 100, 60 and 40 % of the tokens in k4v3, and 20 % in 16
bits. The prompts never change, so only code changes the results. Four groups of prompts are
measured:

* RULER: tasks that the demo's model can do, compressed when the prefill ends, because most outputs
  name the answer within a look-ahead.
* Answers with reasons about documents of HotpotQA and SQuAD, with the look-ahead, from the first
  token that may read a compressed prompt.
* Second turns about such documents, compressed when the prefill ends.
* Ordinary requests, measured like answers with reasons.

A floor is the lower end of the 95 % interval that was measured when it was written. A KL ceiling is
the upper end. In each group a worse baseline must fail all floors: random eviction, or the preset
without its look-ahead at half of the bytes. Floors that such a baseline passes would catch nothing.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.evidence.__main__ import budgets_for, measure, prefill_items
from benchmarks.evidence.cells import (
    AFTER_LOOKAHEAD,
    ORDINARY,
    REASONS,
    RULER,
    SECOND_TURNS,
    Cell,
    cells,
)
from benchmarks.evidence.reference_model import ReferenceModel
from benchmarks.field import field_items, reading
from benchmarks.field.data import FieldData
from vllm_kvcompress.compare.statistics import Estimate
from vllm_kvcompress.compare.tasks import ORDINARY as INSTRUCTIONS
from vllm_kvcompress.compare.tasks import Item, QuestionAt, build_items
from vllm_kvcompress.methods.registry import RECOMMENDED, RECOMMENDED_BUDGETS

FLOORS = Path(__file__).with_name("floors.json")
SLACK = 1.25
"""Factor on the losses that are allowed along many tokens.

Processors round differently. Where two tokens are nearly equally likely, a long output can continue
in other words.
"""
SIXTEEN_BITS = "16 bits"
SIXTEEN_BITS_BUDGET = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The prompts of one gate size.

    Args:
        ruler: RULER's tasks to ask.
        ruler_tokens: their maximum tokens of prompt and output together.
        ruler_count: prompts per such task.
        sources: sources of the documents, from `reading.SOURCES`.
        reading_tokens: maximum tokens of prompts about documents and of ordinary requests.
        reading_count: answers with reasons, and second turns, per source.
        instructions: tasks of ordinary requests.
        requests: requests per such task; half of them have the question before the text.
    """

    ruler: tuple[str, ...]
    ruler_tokens: int
    ruler_count: int
    sources: tuple[str, ...]
    reading_tokens: int
    reading_count: int
    instructions: tuple[str, ...]
    requests: int


SIZES = {
    "full": Size(
        ruler=("niah_single_1", "niah_single_2", "niah_multivalue"),
        ruler_tokens=1536,
        ruler_count=2,
        sources=tuple(reading.SOURCES),
        reading_tokens=1024,
        reading_count=3,
        instructions=tuple(INSTRUCTIONS),
        requests=2,
    ),
    "short": Size(
        ruler=("niah_single_1",),
        ruler_tokens=1000,
        ruler_count=3,
        sources=("hotpotqa",),
        reading_tokens=900,
        reading_count=5,
        instructions=("explain",),
        requests=2,
    ),
}


def recommended_settings(*, lookahead: bool) -> dict[str, str]:
    """Return the recommended settings by name, as JSON.

    Args:
        lookahead: whether settings that evict use the preset's look-ahead. A budget of 1.0 has none
            in the engine.
    """
    found: dict[str, Mapping[str, Any]] = {
        name: {"packed_dtype": "k4v3", "budget": budget}
        for name, budget in RECOMMENDED_BUDGETS.items()
    }
    found[SIXTEEN_BITS] = {"budget": SIXTEEN_BITS_BUDGET}
    return {
        name: json.dumps(
            {
                "compress": RECOMMENDED,
                **settings,
                **({} if lookahead and settings["budget"] < 1 else {"lookahead": 0}),
            }
        )
        for name, settings in found.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """Prompts that are checked together.

    Args:
        task: name of the cell over all prompts of the group.
        positions: range of output tokens to compare, from `POSITION_RANGES`: behind the preset's
            look-ahead, or the first ones without it. None compares expected answers.
        baseline: settings of a worse method that must fail.
        baseline_fails: the floor that the baseline must miss.
    """

    task: str
    positions: str | None
    baseline: Mapping[str, Any]
    baseline_fails: Literal["share", "kl"]

    @property
    def methods(self) -> dict[str, str]:
        """Return the recommended settings and the baseline, by name."""
        return {
            **recommended_settings(lookahead=self.positions == AFTER_LOOKAHEAD),
            BASELINE: json.dumps(self.baseline),
        }


BASELINE = "baseline"
_RANDOM: Mapping[str, Any] = {"compress": "random", "budget": SIXTEEN_BITS_BUDGET}
_LESS: Mapping[str, Any] = {
    "compress": RECOMMENDED,
    "budget": SIXTEEN_BITS_BUDGET / 2,
    "lookahead": 0,
}
GROUPS: Mapping[str, PromptGroup] = {
    "ruler": PromptGroup(task=RULER, positions=None, baseline=_RANDOM, baseline_fails="share"),
    "reasons": PromptGroup(
        task=REASONS, positions=AFTER_LOOKAHEAD, baseline=_RANDOM, baseline_fails="kl"
    ),
    "turns": PromptGroup(
        task=SECOND_TURNS, positions="1 to 32", baseline=_RANDOM, baseline_fails="share"
    ),
    "requests": PromptGroup(
        task=ORDINARY, positions=AFTER_LOOKAHEAD, baseline=_LESS, baseline_fails="kl"
    ),
}
MeasuredCells = Mapping[str, Mapping[str, Cell]]
"""Cells by group name, then by name of the settings."""
Floors = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By group name and name of the settings: the minimum "share" and the maximum "kl"."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--short", action="store_true", help="use fewer and shorter prompts")
    parser.add_argument("--write", action="store_true", help="measure and write new floors")
    args = parser.parse_args(argv)
    # Importing vLLM leaves one thread.
    torch.set_num_threads(os.cpu_count() or 1)
    size = "short" if args.short else "full"
    found = measure_cells(ReferenceModel(args.model), Path(args.model).name, SIZES[size])
    floors = json.loads(FLOORS.read_text()) if FLOORS.exists() else {}
    if args.write:
        floors[size] = {
            name: {
                settings: floor_of(name, cell)
                for settings, cell in found[name].items()
                if settings != BASELINE
            }
            for name in GROUPS
        }
        FLOORS.write_text(json.dumps(floors, indent=2) + "\n")
    faults = check(found, floors[size])
    Console().print(table(found, floors[size]))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def measure_cells(model: ReferenceModel, model_name: str, size: Size) -> MeasuredCells:
    """Return the cells of each group's settings and baseline."""
    data = FieldData()
    return {name: _measure_group(model, model_name, size, data, name) for name in GROUPS}


def _measure_group(
    model: ReferenceModel, model_name: str, size: Size, data: FieldData, name: str
) -> Mapping[str, Cell]:
    methods = GROUPS[name].methods
    pending = [
        (method, budget) for method, raw in methods.items() for budget in budgets_for(raw, ())
    ]
    results: list[dict[str, Any]] = []
    # One value of "question" for both positions, so that they share a cell.
    prompts = {"model": model_name, "question": "", "tokens": 0}
    for seed, items in enumerate(_items(model, size, data, name), 1):
        for item, prompt in prefill_items(model, items, lambda _: True, with_column_sums=False):
            for line in measure(model, item, prompt, pending, methods, decode_fully=False):
                origin = {"seed": seed, "task": item.task, "item": item.name, "group": item.group}
                results.append({**prompts, **origin, **line})
    return {c.method: c for c in cells(results) if c.task == GROUPS[name].task}


def _items(
    model: ReferenceModel, size: Size, data: FieldData, name: str
) -> Sequence[Sequence[Item]]:
    """Return the prompts of a group, one list per seed."""
    if name == "requests":
        positions: Sequence[QuestionAt] = ("first", "last")
        return [
            build_items(
                size.instructions,
                count=size.requests // 2,
                tokens=size.reading_tokens,
                seed=seed,
                question=position,
                count_tokens=model.count_tokens,
                questions_per_text=1,
            )
            for seed, position in enumerate(positions, 1)
        ]
    suffix = {"reasons": "_reasons", "turns": "_second_turn"}
    is_ruler = name == "ruler"
    return [
        field_items(
            data,
            size.ruler if is_ruler else [source + suffix[name] for source in size.sources],
            count=size.ruler_count if is_ruler else size.reading_count,
            tokens=size.ruler_tokens if is_ruler else size.reading_tokens,
            seed=1,
            count_tokens=model.count_tokens,
        )
    ]


class GatedFigures(NamedTuple):
    """The two figures of a cell that have floors."""

    share: Estimate
    """RULER: share of the full cache's score. Other groups: share of equal tokens."""
    kl: Estimate
    """Nats per token."""


def gated_figures(name: str, cell: Cell) -> GatedFigures:
    positions = GROUPS[name].positions
    if positions is not None:
        return GatedFigures(cell.along[positions].top1, cell.along[positions].kl)
    assert cell.score is not None
    assert cell.kl is not None
    return GatedFigures(cell.score, cell.kl)


def floor_of(name: str, cell: Cell) -> dict[str, float]:
    """Return the floor and ceiling of a cell: interval ends, with `SLACK` along many tokens."""
    share, kl = gated_figures(name, cell)
    slack = 1.0 if GROUPS[name].positions is None else SLACK
    return {"share": round(1 - slack * (1 - share.low), 4), "kl": round(slack * kl.high, 4)}


def check(found: MeasuredCells, floors: Floors) -> list[str]:
    """Return one sentence per failed check."""
    faults = []
    for name, group in GROUPS.items():
        baseline = gated_figures(name, found[name][BASELINE])
        for settings, floor in floors[name].items():
            figures = gated_figures(name, found[name][settings])
            if figures.share.mean < floor["share"]:
                faults.append(
                    f"{name}: {settings} must reach a share of at least {floor['share']:.1%} of the"
                    f" full cache, got {figures.share.mean:.1%}"
                )
            if figures.kl.mean > floor["kl"]:
                faults.append(
                    f"{name}: {settings} must have a KL of at most {floor['kl']} nats per token"
                    f" from the full cache, got {figures.kl.mean:.4f}"
                )
            passes = {
                "share": baseline.share.mean >= floor["share"],
                "kl": baseline.kl.mean <= floor["kl"],
            }
            if passes[group.baseline_fails]:
                faults.append(
                    f"{name}: the floors of {settings}, {floor['share']:.1%} and {floor['kl']}"
                    f" nats, would let {json.dumps(group.baseline)} pass with"
                    f" {baseline.share.mean:.1%} and {baseline.kl.mean:.4f} nats: use more or"
                    " harder prompts"
                )
    return faults


def table(found: MeasuredCells, floors: Floors) -> Table:
    """Return a table of all cells with their floors."""
    report = Table(
        "prompts", "settings", "bytes", "share", "low", "floor", "KL", "high", "ceiling", "number"
    )
    for name, cells_of_group in found.items():
        for settings, cell in cells_of_group.items():
            share, kl = gated_figures(name, cell)
            floor = floors[name].get(settings)
            report.add_row(
                name,
                settings,
                "" if cell.bytes is None else f"{cell.bytes:.0%}",
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
