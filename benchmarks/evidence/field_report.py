"""Write the tables and the picture of the field's tasks at equal bytes.

In benchmarks/results, with the repository's root in PYTHONPATH:

    python -m benchmarks.evidence.field_report field_smollm2.jsonl.xz field_qwen2.jsonl.xz \\
        --out field
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.cells import (
    AFTER_LOOKAHEAD,
    FULL,
    REASONS,
    RULER,
    SECOND_TURNS,
    Cell,
    cells,
    read,
)
from benchmarks.evidence.picture import save_bytes_picture
from benchmarks.evidence.systems import (
    FP8_EVICTING,
    K4V3,
    K4V3_ALL,
    LOW_BIT_CACHES,
    RANDOM,
    SIXTEEN_BITS,
)
from benchmarks.field import FIELD_TASKS
from vllm_kvcompress.compare.statistics import Estimate

COMPARED_BYTES = (0.2, 0.1)
"""Bytes at which the table of tasks compares evicting systems."""
_EVICTING = (SIXTEEN_BITS, FP8_EVICTING, K4V3)
_ALONE = (K4V3_ALL, "fp8", "int4_per_token_head", "turboquant_4bit_nc")
_LEGEND = """\
* **Bytes:** what the compressed prompt takes, relative to its 16-bit cache, scales and partly
  filled pages included. An evicting system keeps as many tokens as fit.
* **RULER:** share of the uncompressed model's string-match score that the compressed model reaches,
  over prompts where the uncompressed model scores. Prompts and outputs together have 4,096 tokens.
  Prompts are compressed when the prefill ends, because most outputs end within a look-ahead.
* **Answers with reasons:** the model quotes sentences, then answers. F1 and "same" compare its
  final answer with the uncompressed model's. KL, in nats, and equal tokens are those from the 33rd
  output token on, behind the look-ahead.
* **Second turns:** F1 compares the answer with the uncompressed model's. Prompts are compressed
  when the prefill of the second turn ends.
* Brackets have 95 % bootstrap intervals over prompts.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="outputs of benchmarks.evidence")
    parser.add_argument("--out", type=Path, required=True, help="where to write .md and .png")
    args = parser.parse_args(argv)
    results = [line for line in read(args.results) if line["task"] in FIELD_TASKS]
    found = cells(results)
    args.out.with_suffix(".md").write_text(markdown(found, results))
    reasons = [cell for cell in found if cell.task == REASONS]
    save_bytes_picture(reasons, args.out.with_suffix(".png"))


def markdown(found: Sequence[Cell], results: Sequence[Mapping[str, Any]]) -> str:
    """Return the report: for each model a table by bytes and a table by task."""
    origin = {
        key: ", ".join(sorted({str(line[key]) for line in results}))
        for key in ("dtype", "machine", "commit", "seed")
    }
    parts = [
        "# The field's tasks at equal bytes\n",
        f"{origin['dtype']} with attention in float32, greedy, pages of 16 tokens;"
        f" {origin['machine']}; commit {origin['commit']}; seed {origin['seed']}.\n",
        _LEGEND,
        summary_table(found),
    ]
    for model in dict.fromkeys(cell.model for cell in found):
        of_model = [cell for cell in found if cell.model == model]
        parts += [f"## {model}\n", "By bytes:\n", _by_bytes(of_model)]
        lines = [line for line in results if line["model"] == model]
        for title, columns in _task_columns(of_model):
            parts += [title, _by_task(of_model, lines, columns)]
    return "\n".join(parts)


_SUMMARY: Mapping[str, tuple[str, float]] = {
    "fp8 alone, 0.5": ("fp8", 1.0),
    "k4v3, all tokens, 0.26": (K4V3_ALL, 1.0),
    **{
        f"{name.removesuffix(', evicting')}, {share:g}": (name, share)
        for share in COMPARED_BYTES
        for name in _EVICTING
    },
}
"""Columns of the summary: a system, and its bytes."""


def summary_table(found: Sequence[Cell]) -> str:
    """Return the table of the documentation: figures of each model at equal bytes."""
    figures: Mapping[str, tuple[str, Callable[[Cell], str]]] = {
        "RULER": (RULER, lambda cell: _percent(cell.score, with_interval=False)),
        "reasons, F1": (REASONS, lambda cell: _percent(cell.answer_f1, with_interval=False)),
        "reasons, KL": (REASONS, lambda cell: f"{cell.along[AFTER_LOOKAHEAD].kl.mean:.3f}"),
        "second turn, F1": (
            SECOND_TURNS,
            lambda cell: _percent(cell.answer_f1, with_interval=False),
        ),
    }
    rows = []
    for model in dict.fromkeys(cell.model for cell in found):
        for title, (task, text) in figures.items():
            of_task = {(c.method, c.budget): c for c in found if (c.model, c.task) == (model, task)}
            cells_of_row = [of_task.get(key) for key in _SUMMARY.values()]
            values = ["" if cell is None else text(cell) for cell in cells_of_row]
            rows.append([f"{model}: {title}", *values])
    return _table(["model: task", *_SUMMARY], rows)


def _by_bytes(found: Sequence[Cell]) -> str:
    """Return a table with a line per system and bytes, most bytes first."""
    families = {
        name: {(c.method, c.budget): c for c in found if c.task == name}
        for name in (RULER, REASONS, SECOND_TURNS)
    }
    keys = dict.fromkeys(key for of_family in families.values() for key in of_family)
    rows = []
    for key in keys:
        ruler, reasons, turns = (families[name].get(key) for name in families)
        shares = [c.bytes for c in (ruler, reasons, turns) if c is not None and c.bytes is not None]
        stats = reasons.along.get(AFTER_LOOKAHEAD) if reasons else None
        rows.append(
            (
                sum(shares) / len(shares),
                [
                    key[0],
                    f"{sum(shares) / len(shares):.2f}",
                    _percent(ruler.score if ruler else None),
                    _percent(reasons.answer_f1 if reasons else None),
                    _percent(reasons.answer_same if reasons else None, with_interval=False),
                    ""
                    if stats is None
                    else f"{stats.kl.mean:.3f} ({stats.kl.low:.3f} to {stats.kl.high:.3f})",
                    _percent(stats.top1 if stats else None, with_interval=False),
                    _percent(turns.answer_f1 if turns else None),
                ],
            )
        )
    header = ["system", "bytes", "RULER", "reasons: F1", "same", "KL", "equal tokens"]
    ordered = [row for _, row in sorted(rows, key=lambda pair: -pair[0])]
    return _table([*header, "second turn: F1"], ordered)


Columns = Mapping[str, tuple[str, float]]
"""By column title: the method and budget of its cells."""


def _task_columns(found: Sequence[Cell]) -> list[tuple[str, Columns]]:
    """Return a title and the columns of each table of tasks."""
    measured = {(cell.method, cell.budget) for cell in found}

    def present(columns: Columns) -> Columns:
        return {title: key for title, key in columns.items() if key in measured}

    evicting = {
        f"{name.removesuffix(', evicting')}, {share:g}": (name, share)
        for share in COMPARED_BYTES
        for name in (*_EVICTING, RANDOM)
    }
    alone = {name: (name, 1.0) for name in (*_ALONE, *LOW_BIT_CACHES)}
    return [
        ("Tasks, evicting systems at 0.2 and 0.1 of the bytes:\n", present(evicting)),
        ("Tasks, formats that keep all tokens, at their own bytes:\n", present(alone)),
    ]


def _by_task(found: Sequence[Cell], results: Sequence[Mapping[str, Any]], columns: Columns) -> str:
    """Return a table with a line per task.

    A cell is the share of the uncompressed model's score, or the F1 with its answer.
    """
    rows = []
    for task in FIELD_TASKS:
        of_task = {(c.method, c.budget): c for c in found if c.task == task}
        full = [
            line["score"] for line in results if line["task"] == task and line["method"] == FULL
        ]
        if not full:
            continue
        scored = sum(score > 0 for score in full)
        cells_of_task = (of_task.get(key) for key in columns.values())
        values = [
            "" if cell is None else _percent(cell.answer_f1 or cell.score, with_interval=False)
            for cell in cells_of_task
        ]
        rows.append([f"`{task}`", f"{sum(full) / len(full):.2f}, {scored} of {len(full)}", *values])
    return _table(["task", "uncompressed: score, prompts", *columns], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _percent(estimate: Estimate | None, *, with_interval: bool = True) -> str:
    if estimate is None:
        return ""
    interval = f" ({estimate.low:.0%} to {estimate.high:.0%})" if with_interval else ""
    return f"{estimate.mean:.0%}{interval}"


if __name__ == "__main__":
    main()
