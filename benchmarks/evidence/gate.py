"""The recommended preset against its floor: `make gate`.

    python -m benchmarks.evidence.gate               # ten minutes
    python -m benchmarks.evidence.gate --short       # what the tests run
    python -m benchmarks.evidence.gate --write       # measure the floors anew

The prompts are always the same ones, so that code alone can change what is measured. A floor is the
lower end of the 95 % interval that was measured when it was written, and a ceiling of KL the upper
end. `random` must stay below the floors: a gate that lets it through would let anything through.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.evidence.__main__ import measure, methods_of, read_items
from benchmarks.evidence.cells import ALL, Cell, cells
from benchmarks.evidence.reader import Reader
from benchmarks.evidence.variants import RECOMMENDED
from vllm_kvcompress.compare.tasks import build_items

FLOORS = Path(__file__).with_name("floors.json")
CHANCE = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured.

    Args:
        tasks: of TASKS.
        tokens: longest prompt.
        texts: texts of each task, each asked `per_text` questions.
        budgets: each has a floor. On short prompts little is left of a small one.
    """

    tasks: tuple[str, ...]
    tokens: int
    texts: int
    per_text: int
    budgets: tuple[float, ...]


SIZES = {
    "full": Size(
        tasks=("niah-multikey-1", "niah-multiquery"),
        tokens=2200,
        texts=12,
        per_text=3,
        budgets=(0.2, 0.1),
    ),
    "short": Size(tasks=("niah-multikey-1",), tokens=1100, texts=3, per_text=4, budgets=(0.3, 0.2)),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--short", action="store_true", help="fewer and shorter prompts")
    parser.add_argument("--write", action="store_true", help="write the floors of this size anew")
    args = parser.parse_args(argv)
    size = "short" if args.short else "full"
    found = measured(Reader(args.model), Path(args.model).name, SIZES[size])
    floors = json.loads(FLOORS.read_text()) if FLOORS.exists() else {}
    if args.write:
        floors[size] = {
            str(budget): floor_of(cell)
            for (method, budget), cell in found.items()
            if method == RECOMMENDED
        }
        FLOORS.write_text(json.dumps(floors, indent=2) + "\n")
    faults = judge(found, floors[size])
    Console().print(table(found, floors[size]))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def measured(reader: Reader, model: str, size: Size) -> dict[tuple[str, float], Cell]:
    """Cells of the recommended preset and of chance, by method and budget."""
    methods = methods_of([RECOMMENDED, CHANCE])
    todo = [(name, budget) for name in methods for budget in size.budgets]
    items = build_items(
        size.tasks,
        count=size.texts * size.per_text,
        tokens=size.tokens,
        seed=1,
        question="last",
        count_tokens=reader.count_tokens,
        questions_per_text=size.per_text,
    )
    results: list[dict[str, Any]] = []
    where = {"model": model, "question": "last", "tokens": size.tokens}
    for item, prompt in read_items(reader, items, lambda _: True, sums=False):
        for line in measure(reader, item, prompt, todo, methods):
            results.append({**where, "task": item.task, "group": item.group, **line})
    return {(c.method, c.budget): c for c in cells(results) if c.task == ALL}


def floor_of(cell: Cell) -> dict[str, float]:
    assert cell.score is not None
    assert cell.kl is not None
    return {"score": round(cell.score.low, 4), "kl": round(cell.kl.high, 4)}


def judge(
    found: Mapping[tuple[str, float], Cell], floors: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """What is wrong, a sentence each."""
    faults = []
    for budget, floor in ((float(key), each) for key, each in floors.items()):
        ours, chance = found[RECOMMENDED, budget], found[CHANCE, budget]
        if ours.score.mean < floor["score"]:
            faults.append(
                f"{RECOMMENDED} at {budget} must answer at least {floor['score']:.1%} of what the"
                f" full cache answers, and answers {ours.score.mean:.1%}"
            )
        if ours.kl is None or ours.kl.mean > floor["kl"]:
            kl = "nothing" if ours.kl is None else f"{ours.kl.mean:.4f}"
            faults.append(
                f"{RECOMMENDED} at {budget} must stay within {floor['kl']} nats per token of the"
                f" full cache, and measured {kl}"
            )
        if chance.score.mean >= floor["score"]:
            faults.append(
                f"the floor at {budget}, {floor['score']:.1%}, would let {CHANCE} through with"
                f" {chance.score.mean:.1%}: ask more or harder prompts"
            )
    return faults


def table(
    found: Mapping[tuple[str, float], Cell], floors: Mapping[str, Mapping[str, float]]
) -> Table:
    made = Table("method", "budget", "score", "95 %", "floor", "KL", "ceiling", "prompts")
    for (method, budget), cell in found.items():
        floor = floors[str(budget)] if method == RECOMMENDED else None
        made.add_row(
            method,
            f"{budget:g}",
            f"{cell.score.mean:.1%}",
            f"{cell.score.low:.1%} to {cell.score.high:.1%}",
            f"{floor['score']:.1%}" if floor else "",
            f"{cell.kl.mean:.3f}" if cell.kl else "",
            f"{floor['kl']:.3f}" if floor else "",
            str(cell.score.prompts),
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
