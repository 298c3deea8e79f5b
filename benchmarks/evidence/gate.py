"""The recommended preset against its floors: `make gate`.

    python -m benchmarks.evidence.gate               # twenty minutes
    python -m benchmarks.evidence.gate --short       # what the tests run
    python -m benchmarks.evidence.gate --write       # measure the floors anew

The prompts are always the same ones, so that code alone can change what is measured. Needles judge
what the preset keeps when a prefill ends, since most are named within the tokens of a look-ahead.
Ordinary requests judge the preset as it is, from the first token on that may read a packed prompt.

A floor is the lower end of the 95 % interval that was measured when it was written, and a ceiling
of KL the upper end. Something worse must not pass: `random` with needles, and the preset without
its look-ahead with ordinary requests. A gate that lets these through would let anything through.
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

from benchmarks.evidence.__main__ import measure, methods_of, read_items
from benchmarks.evidence.cells import ALL, ORDINARY, Cell, cells
from benchmarks.evidence.reader import Reader
from benchmarks.evidence.variants import AT_ONCE
from vllm_kvcompress.compare.statistics import Estimate
from vllm_kvcompress.compare.tasks import ORDINARY as INSTRUCTIONS
from vllm_kvcompress.compare.tasks import Item, QuestionAt, build_items
from vllm_kvcompress.methods.presets import RECOMMENDED

FLOORS = Path(__file__).with_name("floors.json")
CHANCE = "random"
PLACE = "from 33"
"""Tokens of an answer: the preset's look-ahead ends before them."""
SLACK = 1.25
"""How much more an ordinary request may lose: processors round in their own ways, and a long answer
goes on in other words where two tokens are nearly as likely."""
NEEDLES, REQUESTS = "needles", "requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured.

    Args:
        tasks: of TASKS, whose right answers are known.
        tokens: longest prompt.
        texts: texts of each task, each asked `per_text` questions.
        budgets: each has a floor. On short prompts little is left of a small one.
        instructions: tasks of ordinary requests.
        requests: of each of them, half before their text and half after it.
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
class Part:
    """Some prompts that are judged alike.

    Args:
        ours: what has a floor.
        worse: what must not pass.
        by: the floor that it must miss.
        task: under which all the prompts are one cell.
    """

    ours: str
    worse: str
    by: Literal["share", "kl"]
    task: str


PARTS: Mapping[str, Part] = {
    NEEDLES: Part(ours=AT_ONCE, worse=CHANCE, by="share", task=ALL),
    REQUESTS: Part(ours=RECOMMENDED, worse=AT_ONCE, by="kl", task=ORDINARY),
}
Found = Mapping[str, Mapping[tuple[str, float], Cell]]
"""Cells by part, and in it by method and budget."""
Floors = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By part and budget: the share that must be reached at least, and the KL at most."""


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
            name: {
                str(budget): floor_of(cell)
                for (method, budget), cell in found[name].items()
                if method == part.ours
            }
            for name, part in PARTS.items()
        }
        FLOORS.write_text(json.dumps(floors, indent=2) + "\n")
    faults = judge(found, floors[size])
    Console().print(table(found, floors[size]))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def measured(reader: Reader, model: str, size: Size) -> Found:
    """Cells of what has a floor and of what must not pass."""
    return {name: _measured(reader, model, size, name) for name in PARTS}


def _measured(
    reader: Reader, model: str, size: Size, name: str
) -> Mapping[tuple[str, float], Cell]:
    part = PARTS[name]
    methods = methods_of([part.ours, part.worse])
    pack_request = [(method, budget) for method in methods for budget in size.budgets]
    results: list[dict[str, Any]] = []
    # of two places of a question, but judged together
    where = {"model": model, "question": "", "tokens": size.tokens}
    for seed, items in enumerate(_items(reader, size, name), 1):
        for item, prompt in read_items(reader, items, lambda _: True, sums=False):
            for line in measure(reader, item, prompt, pack_request, methods, own_answers=False):
                results.append(
                    {**where, "seed": seed, "task": item.task, "group": item.group, **line}
                )
    return {(c.method, c.budget): c for c in cells(results) if c.task == part.task}


def _items(reader: Reader, size: Size, name: str) -> Iterator[list[Item]]:
    """The prompts, by where their question stands."""
    if name == NEEDLES:
        yield build_items(
            size.tasks,
            count=size.texts * size.per_text,
            tokens=size.tokens,
            seed=1,
            question="last",
            count_tokens=reader.count_tokens,
            questions_per_text=size.per_text,
        )
        return
    places: Sequence[QuestionAt] = ("first", "last")
    for seed, place in enumerate(places, 1):
        yield build_items(
            size.instructions,
            count=size.requests // 2,
            tokens=size.tokens,
            seed=seed,
            question=place,
            count_tokens=reader.count_tokens,
            questions_per_text=1,
        )


class Judged(NamedTuple):
    """What a floor is about."""

    share: Estimate
    """Of needles what is named of what the full cache names, of ordinary requests equal tokens."""
    kl: Estimate
    """Nats per token, of ordinary requests in `PLACE`."""


def judged(cell: Cell) -> Judged:
    if cell.score is None:
        return Judged(cell.along[PLACE].top1, cell.along[PLACE].kl)
    assert cell.kl is not None
    return Judged(cell.score, cell.kl)


def floor_of(cell: Cell) -> dict[str, float]:
    """The ends of its intervals; of ordinary requests with some `SLACK`."""
    share, kl = judged(cell)
    slack = SLACK if cell.score is None else 1.0
    return {"share": round(1 - slack * (1 - share.low), 4), "kl": round(slack * kl.high, 4)}


def judge(found: Found, floors: Floors) -> list[str]:
    """What is wrong, a sentence each."""
    faults = []
    for name, part in PARTS.items():
        for budget, floor in ((float(key), each) for key, each in floors[name].items()):
            ours = judged(found[name][part.ours, budget])
            worse = judged(found[name][part.worse, budget])
            if ours.share.mean < floor["share"]:
                faults.append(
                    f"{name}: {part.ours} at {budget} must answer at least {floor['share']:.1%} as"
                    f" the full cache does, and answers {ours.share.mean:.1%}"
                )
            if ours.kl.mean > floor["kl"]:
                faults.append(
                    f"{name}: {part.ours} at {budget} must stay within {floor['kl']} nats per token"
                    f" of the full cache, and measured {ours.kl.mean:.4f}"
                )
            passes = {
                "share": worse.share.mean >= floor["share"],
                "kl": worse.kl.mean <= floor["kl"],
            }
            if passes[part.by]:
                faults.append(
                    f"{name}: the floors at {budget}, {floor['share']:.1%} and {floor['kl']} nats,"
                    f" would let {part.worse} through with {worse.share.mean:.1%} and"
                    f" {worse.kl.mean:.4f}: ask more or harder prompts"
                )
    return faults


def table(found: Found, floors: Floors) -> Table:
    made = Table(
        "prompts", "method", "budget", "share", "least", "floor", "KL", "most", "ceiling", "number"
    )
    for name, here in found.items():
        for (method, budget), cell in here.items():
            share, kl = judged(cell)
            floor = floors[name][str(budget)] if method == PARTS[name].ours else None
            made.add_row(
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
    return made


if __name__ == "__main__":
    sys.exit(main())
