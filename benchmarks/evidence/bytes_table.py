"""Tables of methods and cache formats by the bytes that a prompt takes."""

from collections.abc import Sequence

from benchmarks.evidence.cells import AFTER_LOOKAHEAD, ALL, Cell
from vllm_kvcompress.compare.statistics import Estimate
from vllm_kvcompress.compare.tasks import ORDINARY as INSTRUCTIONS

LEGEND = (
    "Bytes: what the compressed prompt takes, relative to the same prompt in 16 bits. Scales and"
    " partly filled pages count. The output tokens of a look-ahead are part of the prompt. Later"
    " output tokens do not count: they have 16 bits, or the format of a low-bit cache. For outputs"
    " without a known right answer, KL and equal tokens are those from the 33rd output token on.\n"
)


def bytes_tables(found: Sequence[Cell]) -> list[str]:
    """Return a title and a table for all ordinary requests together, and for each other task.

    Args:
        found: cells of one model, prompt length and question position.
    """
    parts = []
    for task in dict.fromkeys(cell.task for cell in found):
        if task == ALL or task in INSTRUCTIONS:
            continue
        of_task = [cell for cell in found if cell.task == task and cell.bytes is not None]
        if not of_task:
            continue
        prompts = max(cell.same.prompts for cell in of_task)
        parts += [f"{task}, {prompts} prompts, by bytes:\n", _table(of_task)]
    return parts


def _table(found: Sequence[Cell]) -> str:
    rows = []
    with_bytes = [(cell.bytes, cell) for cell in found if cell.bytes is not None]
    for share, cell in sorted(with_bytes, key=lambda pair: -pair[0]):
        stats = cell.along.get(AFTER_LOOKAHEAD)
        rows.append(
            {
                "method": f"`{cell.method}`",
                "budget": f"{cell.budget:g}",
                "bytes": f"{share:.3f}",
                "score": _percent(cell.score),
                "KL": _nats(cell.kl if stats is None else stats.kl),
                "equal tokens": _percent(None if stats is None else stats.top1),
            }
        )
    header = [title for title in rows[0] if any(row[title] for row in rows)]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [[row[title] for title in header] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    return f"{estimate.mean:.1%} ({estimate.low:.1%} to {estimate.high:.1%})"


def _nats(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    return f"{estimate.mean:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
