"""Write the tables of the field's tasks at equal bytes.

In benchmarks/results, with the repository's root in PYTHONPATH:

    python -m benchmarks.evidence.field_report field_smollm2.jsonl.xz field_qwen2.jsonl.xz \\
        --out field
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.evidence import harm_table
from benchmarks.evidence.cells import FULL, REASONS, RULER, SECOND_TURNS, Cell, cells, read
from benchmarks.evidence.report import late_kl, late_top1
from benchmarks.evidence.systems import (
    FP8_EVICTING,
    K4V3,
    K4V3_ALL,
    LOW_BIT_CACHES,
    RANDOM,
    SIXTEEN_BITS,
)
from benchmarks.field import FIELD_TASKS, harm
from benchmarks.jsonl import Line
from vllm_kvcompress.compare.statistics import Estimate
from vllm_kvcompress.compare.tables import markdown_table, with_interval

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
    parser.add_argument("--out", type=Path, required=True, help="where to write .md")
    args = parser.parse_args(argv)
    results = [line for line in read(args.results) if line["task"] in FIELD_TASKS]
    of_harm = [line for line in results if line["task"] in harm.TASKS]
    others = [line for line in results if line["task"] not in harm.TASKS]
    parts = [markdown(cells(others), others)] if others else []
    parts += [harm_markdown(of_harm)] if of_harm else []
    args.out.with_suffix(".md").write_text("\n".join(parts))


def markdown(found: Sequence[Cell], results: Sequence[Line]) -> str:
    """Return the report: for each model a table by bytes and a table by task."""
    parts = [
        "# The field's tasks at equal bytes\n",
        _origin(results),
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


def harm_markdown(results: Sequence[Line]) -> str:
    """Return the report of the tasks where compression is known to do harm."""
    title = "# Tasks that compression is known to harm\n"
    return "\n".join([title, _origin(results), harm_table.LEGEND, harm_table.harm_tables(results)])


def _origin(results: Sequence[Line]) -> str:
    origin = {
        key: ", ".join(sorted({str(line[key]) for line in results}))
        for key in ("dtype", "machine", "commit", "seed")
    }
    return (
        f"{origin['dtype']} with attention in float32, greedy, pages of 16 tokens;"
        f" {origin['machine']}; commit {origin['commit']}; seed {origin['seed']}.\n"
    )


Columns = Mapping[str, tuple[str, float]]
"""By column title: the method and budget of its cells."""


def _evicting(*names: str) -> Columns:
    return {
        f"{name.removesuffix(', evicting')}, {share:g}": (name, share)
        for share in COMPARED_BYTES
        for name in names
    }


_SUMMARY: Columns = {
    "fp8 alone, 0.5": ("fp8", 1.0),
    "k4v3, all tokens, 0.26": (K4V3_ALL, 1.0),
    **_evicting(*_EVICTING),
}


def summary_table(found: Sequence[Cell]) -> str:
    """Return the table of the documentation: figures of each model at equal bytes."""
    figures: Mapping[str, tuple[str, Callable[[Cell], str]]] = {
        "RULER": (RULER, lambda cell: _mean(cell.score)),
        "reasons, F1": (REASONS, lambda cell: _mean(cell.answer_f1)),
        "reasons, KL": (REASONS, lambda cell: _mean(late_kl(cell), ".3f")),
        "second turn, F1": (SECOND_TURNS, lambda cell: _mean(cell.answer_f1)),
    }
    rows = []
    for model in dict.fromkeys(cell.model for cell in found):
        for title, (task, text) in figures.items():
            of_task = {(c.method, c.budget): c for c in found if (c.model, c.task) == (model, task)}
            of_row = [of_task.get(key) for key in _SUMMARY.values()]
            rows.append([f"{model}: {title}", *("" if c is None else text(c) for c in of_row)])
    return markdown_table(["model: task", *_SUMMARY], rows)


def _by_bytes(found: Sequence[Cell]) -> str:
    """Return a table with a line per system and bytes, most bytes first."""
    figures: Mapping[str, tuple[str, Callable[[Cell], str]]] = {
        "RULER": (RULER, lambda cell: with_interval(cell.score, ".0%")),
        "reasons: F1": (REASONS, lambda cell: with_interval(cell.answer_f1, ".0%")),
        "same": (REASONS, lambda cell: _mean(cell.answer_same)),
        "KL": (REASONS, lambda cell: with_interval(late_kl(cell), ".3f")),
        "equal tokens": (REASONS, lambda cell: _mean(late_top1(cell))),
        "second turn: F1": (SECOND_TURNS, lambda cell: with_interval(cell.answer_f1, ".0%")),
    }
    by_key: dict[tuple[str, float], dict[str, Cell]] = {}
    for family in (RULER, REASONS, SECOND_TURNS):
        for cell in found:
            if cell.task == family:
                by_key.setdefault((cell.method, cell.budget), {})[family] = cell
    rows = []
    for (method, _), of_system in by_key.items():
        share = fmean(cell.bytes for cell in of_system.values() if cell.bytes is not None)
        texts = (text(of_system[f]) if f in of_system else "" for f, text in figures.values())
        rows.append((share, [method, f"{share:.2f}", *texts]))
    rows.sort(key=lambda row: -row[0])
    return markdown_table(["system", "bytes", *figures], [row for _, row in rows])


def _task_columns(found: Sequence[Cell]) -> list[tuple[str, Columns]]:
    """Return a title and the columns of each table of tasks."""
    measured = {(cell.method, cell.budget) for cell in found}
    alone = {name: (name, 1.0) for name in (*_ALONE, *LOW_BIT_CACHES)}
    return [
        (title, {name: key for name, key in columns.items() if key in measured})
        for title, columns in (
            (
                "Tasks, evicting systems at 0.2 and 0.1 of the bytes:\n",
                _evicting(*_EVICTING, RANDOM),
            ),
            ("Tasks, formats that keep all tokens, at their own bytes:\n", alone),
        )
    ]


def _by_task(found: Sequence[Cell], results: Sequence[Line], columns: Columns) -> str:
    """Return a table with a line per task.

    A cell is the share of the uncompressed model's score, or the F1 with its answer.
    """
    rows = []
    for task in FIELD_TASKS:
        of_task = {(c.method, c.budget): c for c in found if c.task == task}
        full = [
            line["score"] for line in results if line["task"] == task and line["method"] == FULL
        ]
        if full:
            scored = sum(score > 0 for score in full)
            of_row = (of_task.get(key) for key in columns.values())
            texts = ("" if c is None else _mean(c.answer_f1 or c.score) for c in of_row)
            rows.append([f"`{task}`", f"{fmean(full):.2f}, {scored} of {len(full)}", *texts])
    return markdown_table(["task", "uncompressed: score, prompts", *columns], rows)


def _mean(found: Estimate | None, form: str = ".0%") -> str:
    return "" if found is None else format(found.mean, form)


if __name__ == "__main__":
    main()
