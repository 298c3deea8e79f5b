"""Write tables and a picture of measured outputs.

In benchmarks/results, with the repository's root in PYTHONPATH, these commands write the reports:

    python -m benchmarks.evidence.report evidence_smollm2.jsonl.xz evidence_qwen2.jsonl.xz \\
        --out evidence
    python -m benchmarks.evidence.report ordinary_qwen2.jsonl.xz late_smollm2.jsonl.xz \\
        late_qwen2.jsonl.xz texts_gemma3.jsonl.xz --out ordinary
    python -m benchmarks.evidence.report formats_smollm2.jsonl.xz formats_qwen2.jsonl.xz \\
        --out formats
    python -m benchmarks.evidence.report formats_tasks_smollm2.jsonl.xz \\
        formats_tasks_qwen2.jsonl.xz --out formats_tasks
    python -m benchmarks.evidence.report settings_qwen2.jsonl.xz --pooled --out settings

Git keeps the .md files, evidence.png and formats.png. It ignores the other files, which follow from
the raw files.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.bytes_table import LEGEND as OF_BYTES
from benchmarks.evidence.bytes_table import bytes_tables
from benchmarks.evidence.cells import ALL, ORDINARY, Cell, answered_counts, as_json, cells, read
from benchmarks.evidence.picture import save_picture
from benchmarks.evidence.pooled_table import AFTER_FIRST, differences, differences_table, pooled
from benchmarks.evidence.pooled_table import LEGEND as OF_POOLED
from benchmarks.evidence.position_tables import LEGEND, position_tables
from benchmarks.evidence.rules_table import LEGEND as OF_RULES
from benchmarks.evidence.rules_table import rules_table
from benchmarks.evidence.variants import VARIANTS, WITHOUT_LOOKAHEAD
from vllm_kvcompress.compare.tasks import SCORED
from vllm_kvcompress.methods.registry import RECOMMENDED

PromptKey = tuple[str, str, int]
"""Model name, question position and maximum prompt tokens."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="outputs of benchmarks.evidence")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="where to write .json, .md and .png",
    )
    parser.add_argument(
        "--pooled",
        action="store_true",
        help="also write ordinary requests with the instruction first and last together, and the"
        " differences between systems",
    )
    args = parser.parse_args(argv)
    results = read(args.results)
    found = cells(results)
    origin = {
        key: sorted({str(line[key]) for line in results}) for key in ("machine", "commit", "seed")
    }
    document = {"origin": origin, "cells": as_json(found)}
    args.out.with_suffix(".json").write_text(json.dumps(document, indent=0) + "\n")
    text = markdown(found, results, origin)
    if args.pooled:
        text += "\n" + pooled_markdown(pooled(results))
    args.out.with_suffix(".md").write_text(text)
    save_picture(found, args.out.with_suffix(".png"))


def markdown(
    found: Sequence[Cell], results: Sequence[dict[str, Any]], origin: dict[str, list[str]]
) -> str:
    """Return the report: per model the presets, the variants, the rules and each task."""
    parts = ["# Output quality by method\n", _legend(origin)]
    prompt_keys = list(dict.fromkeys(_cell_key(cell) for cell in found))
    for prompt_key in prompt_keys:
        of_prompts = [cell for cell in found if _cell_key(cell) == prompt_key]
        model, question, tokens = prompt_key
        parts.append(f"## {model}, question {question}, up to {tokens:,} tokens\n")
        counts = answered_counts(results)
        ordinary = [cell for cell in of_prompts if cell.along]
        if ordinary:
            parts += [LEGEND, *position_tables(ordinary)]
        if any(cell.bytes is not None for cell in of_prompts):
            parts.append(OF_BYTES)
            parts += bytes_tables(of_prompts)
        of_prompts = [cell for cell in of_prompts if cell.task != ORDINARY]
        tasks = list(dict.fromkeys(cell.task for cell in of_prompts if cell.task != ALL))
        known = [task for task in tasks if task in SCORED]
        right = ", ".join(f"`{task}` {counts[(*prompt_key, task)]}" for task in known)
        if right:
            parts.append(f"The uncompressed model gets right, at least in part: {right}.\n")
        all_tasks = [cell for cell in of_prompts if cell.task == ALL]
        presets = [c for c in all_tasks if c.method not in _only_variants()]
        if presets:
            parts.append(_table(presets))
        variants = [cell for cell in all_tasks if cell.method in VARIANTS]
        if len({cell.method for cell in variants}) > 1:
            parts.append("The recommended preset with one part replaced, on the same prompts:\n")
            parts.append(_table(_on_the_same_prompts(results, prompt_key)))
        if rules := rules_table([line for line in results if _line_key(line) == prompt_key]):
            parts += [OF_RULES, rules]
        if len(tasks) > 1 or not all_tasks:
            for task in tasks:
                parts.append(f"`{task}`:\n")
                of_task = [
                    c for c in of_prompts if c.task == task and c.method not in _only_variants()
                ]
                parts.append(_table(of_task))
    return "\n".join(parts)


def pooled_markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return tables of `pooled` lines: each system by bytes, and the differences between them."""
    parts = []
    for model in dict.fromkeys(line["model"] for line in results):
        of_model = [line for line in results if line["model"] == model]
        parts += [f"## {model}, question first and last together\n", OF_POOLED]
        parts += bytes_tables(cells(of_model))
        for title, found in (
            ("from the 33rd output token on", differences(of_model)),
            ("over all output tokens after the first", differences(of_model, AFTER_FIRST)),
        ):
            parts += [f"Differences {title}:\n", differences_table(found)]
    return "\n".join(parts)


def _only_variants() -> set[str]:
    return set(VARIANTS) - {WITHOUT_LOOKAHEAD}


def _on_the_same_prompts(results: Sequence[dict[str, Any]], prompt_key: PromptKey) -> list[Cell]:
    """Return cells of the variants over the prompts that have results for all of them."""
    lines = [
        line for line in results if _line_key(line) == prompt_key and line["method"] in VARIANTS
    ]
    others = _only_variants() & {line["method"] for line in lines}
    budgets = {line["budget"] for line in lines if line["method"] in others}
    measured: dict[str, set[tuple[str, float]]] = {}
    for line in lines:
        measured.setdefault(line["item"], set()).add((line["method"], line["budget"]))
    wanted = {(name, budget) for name in (*others, WITHOUT_LOOKAHEAD) for budget in budgets}
    shared = {item for item, have in measured.items() if wanted <= have}
    kept = [line for line in lines if line["item"] in shared and line["budget"] in budgets]
    return [cell for cell in cells(kept) if cell.task == ALL]


def _line_key(line: Mapping[str, Any]) -> PromptKey:
    return line["model"], line["question"], line["tokens"]


def _cell_key(cell: Cell) -> PromptKey:
    return cell.model, cell.question, cell.tokens


def _legend(origin: dict[str, list[str]]) -> str:
    return (
        "Score: of what the uncompressed model's output names, the share that the compressed"
        " model's greedy output names, too. Only prompts where the uncompressed model names"
        " something count. Brackets have the 95 % interval of a bootstrap over texts. It cannot"
        " know of losses that no text showed: if 20 texts show none, up to 14 % of all texts may"
        " have one. A cell of fewer prompts than the others in its table gives their number. KL:"
        " nats per token from the uncompressed model's distributions, along its own output without"
        " the first token, which is the same for all.\n\n"
        f"Float32, greedy, pages of 16 tokens; {', '.join(origin['machine'])};"
        f" commit {', '.join(origin['commit'])}; seed {', '.join(origin['seed'])}.\n"
    )


def _table(found: Sequence[Cell]) -> str:
    budgets = sorted({cell.budget for cell in found}, reverse=True)
    by = {(cell.method, cell.budget): cell for cell in found}
    methods = list(dict.fromkeys(cell.method for cell in found))
    smallest = budgets[-1] if budgets else 0.0
    middle = budgets[len(budgets) // 2] if budgets else 0.0

    def rank(method: str) -> tuple[float, float]:
        cells_of = [by.get((method, budget)) for budget in (middle, smallest)]
        scores = [-cell.score.mean if cell and cell.score else 0.0 for cell in cells_of]
        if not any(scores):
            scores = [cell.kl.mean if cell and cell.kl else 0.0 for cell in cells_of]
        return scores[0], scores[1]

    scored = any(cell.score for cell in found)
    max_prompts = max((cell.score.prompts for cell in found if cell.score), default=0)
    header = ["method", *(f"score, {b:g}" for b in budgets if scored)]
    header += [f"KL, {b:g}" for b in budgets]
    rows = []
    for method in sorted(methods, key=rank):
        label = f"**`{method}`**" if method in (RECOMMENDED, WITHOUT_LOOKAHEAD) else f"`{method}`"
        of_method = [by.get((method, budget)) for budget in budgets]
        scores = [_score(cell, max_prompts) for cell in of_method if scored]
        rows.append([label, *scores, *(_kl(cell) for cell in of_method)])
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _score(cell: Cell | None, max_prompts: int) -> str:
    if cell is None or cell.score is None:
        return ""
    fewer = "" if cell.score.prompts == max_prompts else f", of {cell.score.prompts} prompts"
    return f"{cell.score.mean:.0%} ({cell.score.low:.0%} to {cell.score.high:.0%}{fewer})"


def _kl(cell: Cell | None) -> str:
    return "" if cell is None or cell.kl is None else f"{cell.kl.mean:.3f}"


if __name__ == "__main__":
    main()
