"""Tables for tasks without expected answers: divergence by position in the output."""

from collections.abc import Sequence

from benchmarks.evidence.cells import ORDINARY, POSITION_RANGES, Cell
from benchmarks.evidence.texts import TASK as TEXTS
from vllm_kvcompress.compare.statistics import Estimate

LEGEND = (
    "Outputs without a known right answer, by the position of a token in the uncompressed model's"
    " output after its first token. Cells have KL in nats per token and the share of tokens that"
    " the compressed model would choose, too, each with its 95 % interval. Tokens before the end of"
    " a look-ahead are the uncompressed model's. The other columns, where there are any, are about"
    " greedy outputs: how similar their words are to the uncompressed output's, their length"
    " relative to it, and how many end in a loop, with the uncompressed share in brackets.\n"
)


def position_tables(found: Sequence[Cell]) -> list[str]:
    """Return a title and a table for all ordinary requests together, and for plain texts.

    Without ordinary requests, each task gets its own table.
    """
    tasks = dict.fromkeys(cell.task for cell in found)
    if ORDINARY in tasks:
        # One task alone has too few prompts for a table of its own.
        tasks = dict.fromkeys([ORDINARY, *(task for task in tasks if task == TEXTS)])
    parts = []
    for task in tasks:
        of_task = [cell for cell in found if cell.task == task]
        prompts = max(cell.same.prompts for cell in of_task)
        parts += [f"{task}, {prompts} prompts:\n", _table(of_task)]
    return parts


def _table(found: Sequence[Cell]) -> str:
    complete = any(cell.similarity for cell in found)
    header = ["method", "budget", *(f"tokens {name}" for name in POSITION_RANGES)]
    header += ["similarity", "length", "loops"] if complete else []
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for cell in sorted(found, key=lambda cell: -cell.budget):
        row = [f"`{cell.method}`", f"{cell.budget:g}"]
        row += [_position_cell(cell, name) for name in POSITION_RANGES]
        if complete:
            row += [_with_interval(cell.similarity), _with_interval(cell.length), _loops(cell)]
        lines.append(row)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _position_cell(cell: Cell, name: str) -> str:
    if name not in cell.along:
        return ""
    kl, top1 = cell.along[name].kl, cell.along[name].top1
    return f"{_with_interval(kl)}; {top1.mean:.0%} ({top1.low:.0%} to {top1.high:.0%})"


def _with_interval(estimate: Estimate | None) -> str:
    return (
        ""
        if estimate is None
        else f"{estimate.mean:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"
    )


def _loops(cell: Cell) -> str:
    return "" if cell.loops is None else f"{cell.loops:.0%} ({cell.full_loops:.0%})"
