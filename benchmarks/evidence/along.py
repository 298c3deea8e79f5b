"""A table of answers that nobody knows: what is lost along them, and what became of them."""

from collections.abc import Sequence

from benchmarks.evidence.cells import ORDINARY, PLACES, Cell
from benchmarks.evidence.texts import TASK as TEXTS
from vllm_kvcompress.compare.statistics import Estimate

LEGEND = (
    "Outputs without a known right answer, by the place of a token in the uncompressed model's"
    " output after its first token. Cells have KL in nats per token and the share of tokens that"
    " the compressed model would choose, too, each with its 95 % interval. Tokens before the end of"
    " a look-ahead are the uncompressed model's. The other columns, where there are any, are about"
    " greedy outputs: how similar their words are to the uncompressed output's, their length"
    " relative to it, and how many end in a loop, with the uncompressed share in brackets.\n"
)


def along(found: Sequence[Cell]) -> list[str]:
    """A title and a table for all ordinary requests, and for each task that is none of them."""
    tasks = dict.fromkeys(cell.task for cell in found)
    if ORDINARY in tasks:
        # What is together in it is not told apart as well: such cells are of few prompts.
        tasks = dict.fromkeys([ORDINARY, *(task for task in tasks if task == TEXTS)])
    parts = []
    for task in tasks:
        of_task = [cell for cell in found if cell.task == task]
        prompts = max(cell.same.prompts for cell in of_task)
        parts += [f"{task}, {prompts} prompts:\n", _table(of_task)]
    return parts


def _table(found: Sequence[Cell]) -> str:
    told = any(cell.similarity for cell in found)
    header = ["method", "budget", *(f"tokens {place}" for place in PLACES)]
    header += ["similarity", "length", "loops"] if told else []
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for cell in sorted(found, key=lambda cell: -cell.budget):
        row = [f"`{cell.method}`", f"{cell.budget:g}"]
        row += [_place(cell, place) for place in PLACES]
        if told:
            row += [_figure(cell.similarity), _figure(cell.length), _loops(cell)]
        lines.append(row)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _place(cell: Cell, place: str) -> str:
    if place not in cell.along:
        return ""
    kl, top1 = cell.along[place].kl, cell.along[place].top1
    return f"{_figure(kl)}; {top1.mean:.0%} ({top1.low:.0%} to {top1.high:.0%})"


def _figure(found: Estimate | None) -> str:
    return "" if found is None else f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"


def _loops(cell: Cell) -> str:
    return "" if cell.loops is None else f"{cell.loops:.0%} ({cell.full_loops:.0%})"
