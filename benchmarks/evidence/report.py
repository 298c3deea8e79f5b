"""Write tables of measured outputs.

In benchmarks/results, with the repository's root in PYTHONPATH, these commands write the reports:

    python -m benchmarks.evidence.report ordinary_qwen2.jsonl.xz late_smollm2.jsonl.xz \\
        late_qwen2.jsonl.xz texts_gemma3.jsonl.xz --out ordinary
    python -m benchmarks.evidence.report formats_smollm2.jsonl.xz formats_qwen2.jsonl.xz \\
        --out formats
    python -m benchmarks.evidence.report formats_tasks_smollm2.jsonl.xz \\
        formats_tasks_qwen2.jsonl.xz --out formats_tasks
    python -m benchmarks.evidence.report settings_qwen2.jsonl.xz --pooled --out settings
    python -m benchmarks.evidence.report harm_qwen2.jsonl.xz harm_smollm2.jsonl.xz --out harm

Results of the field's tasks begin with a table of the systems at equal bytes. Tasks that
compression is known to harm get tables of their own.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.evidence import harm_table
from benchmarks.evidence.cells import (
    AFTER_FIRST,
    AFTER_LOOKAHEAD,
    ALL,
    FAMILIES,
    ORDINARY,
    POSITION_RANGES,
    REASONS,
    RULER,
    SECOND_TURNS,
    Cell,
    answered_counts,
    cells,
    differences,
    pooled,
    read,
    sampling_group,
)
from benchmarks.evidence.systems import (
    FP8_EVICTING,
    K4V3,
    K4V3_ALL,
    SIXTEEN_BITS,
    WITHOUT_LOOKAHEAD,
)
from benchmarks.evidence.texts import TASK as TEXTS
from benchmarks.field import harm
from benchmarks.jsonl import Line
from vllm_kvcompress.compare.statistics import Estimate, RuleResults, shares_obeyed
from vllm_kvcompress.compare.tables import markdown_table, with_interval
from vllm_kvcompress.compare.tasks import ORDINARY as INSTRUCTIONS
from vllm_kvcompress.compare.tasks import SCORED
from vllm_kvcompress.methods.registry import RECOMMENDED

Columns = Mapping[str, Callable[[Cell], str]]
"""By title, the text of a cell."""
_LEGEND = (
    "Score: of what the uncompressed model's output names, the share that the compressed"
    " model's greedy output names, too. Only prompts where the uncompressed model names"
    " something count. Brackets have the 95 % interval of a bootstrap over texts. It cannot"
    " know of losses that no text showed: if 20 texts show none, up to 14 % of all texts may"
    " have one. A cell of fewer prompts than the others in its table gives their number. KL:"
    " nats per token from the uncompressed model's distributions, along its own output without"
    " the first token, which is the same for all.\n\n"
)
_OF_POSITIONS = (
    "Outputs without a known right answer, by the position of a token in the uncompressed model's"
    " output after its first token. Cells have KL in nats per token and the share of tokens that"
    " the compressed model would choose, too, each with its 95 % interval. Tokens before the end of"
    " a look-ahead are the uncompressed model's. The other columns, where there are any, are about"
    " greedy outputs: how similar their words are to the uncompressed output's, their length"
    " relative to it, and how many end in a loop, with the uncompressed share in brackets.\n"
)
_OF_BYTES = (
    "Bytes: what the compressed prompt takes, relative to the same prompt in 16 bits. Scales and"
    " partly filled pages count. The output tokens of a look-ahead are part of the prompt. Later"
    " output tokens do not count: they have 16 bits, or the format of a low-bit cache. For outputs"
    " without a known right answer, KL and equal tokens are those from the 33rd output token on.\n"
)
_OF_FAMILIES = (
    "The field's tasks at equal bytes. RULER: the share of the uncompressed model's string-match"
    " score. Answers with reasons, and second turns: token F1 of the answer with the uncompressed"
    " model's. In the tables by bytes, same: the share of answers that equal it.\n"
)
_OF_RULES = (
    "Rules that a program checks: of the prompts in which the uncompressed model obeys the rule,"
    " the share in which the compressed model obeys it, too, with its 95 % interval. Prompts: the"
    " number of prompts in which the uncompressed model obeys the rule.\n"
)
_OF_POOLED = (
    "Instruction first and last together. Both prompts over one text are drawn together. Outputs"
    " that end before the tokens that count do not count. A difference is of the same tokens under"
    " both systems: the first minus the second, in percentage points of equal tokens and in nats"
    " per token. Its order is real if the interval excludes 0.\n"
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="outputs of benchmarks.evidence")
    parser.add_argument("--out", type=Path, required=True, help="where to write the .md file")
    parser.add_argument(
        "--pooled",
        action="store_true",
        help="also write ordinary requests with the instruction first and last together, and the"
        " differences between systems",
    )
    args = parser.parse_args(argv)
    all_results = read(args.results)
    of_harm = [line for line in all_results if line["task"] in harm.TASKS]
    results = [line for line in all_results if line["task"] not in harm.TASKS]
    parts = [markdown(cells(results), results)] if results else []
    if args.pooled:
        parts.append(pooled_markdown(pooled(results)))
    if of_harm:
        title = "# Tasks that compression is known to harm\n"
        parts += [title, _origin(of_harm), harm_table.LEGEND, harm_table.harm_tables(of_harm)]
    args.out.with_suffix(".md").write_text("\n".join(parts))


def _origin(results: Sequence[Line]) -> str:
    """Return a sentence about how and where the results were measured."""
    dtypes, machines, commits, seeds = (
        ", ".join(sorted({str(line.get(key, "float32")) for line in results}))
        for key in ("dtype", "machine", "commit", "seed")
    )
    return (
        f"{dtypes} with attention in float32, greedy, pages of 16 tokens; {machines}; commit"
        f" {commits}; seed {seeds}.\n"
    )


def markdown(found: Sequence[Cell], results: Sequence[Line]) -> str:
    """Return the report: for each model, question position and length its tables."""
    parts = ["# Output quality by method\n", _LEGEND + _origin(results)]
    if any(cell.task in (RULER, REASONS, SECOND_TURNS) for cell in found):
        parts += [_OF_FAMILIES, summary_table(found)]
    counts = answered_counts(results)
    for prompt_key in dict.fromkeys((c.model, c.question, c.tokens) for c in found):
        model, question, tokens = prompt_key
        of_prompts = [c for c in found if (c.model, c.question, c.tokens) == prompt_key]
        of_lines = [
            line
            for line in results
            if (line["model"], line["question"], line["tokens"]) == prompt_key
        ]
        parts.append(f"## {model}, question {question}, up to {tokens:,} tokens\n")
        if ordinary := [cell for cell in of_prompts if cell.along]:
            parts += [_OF_POSITIONS, *position_tables(ordinary)]
        if any(cell.bytes is not None for cell in of_prompts):
            parts += [_OF_BYTES, *bytes_tables(of_prompts)]
        of_prompts = [cell for cell in of_prompts if cell.task != ORDINARY]
        tasks = list(dict.fromkeys(cell.task for cell in of_prompts if cell.task != ALL))
        known = [
            f"`{task}` {count}"
            for (*key, task), count in counts.items()
            if tuple(key) == prompt_key and (task in SCORED or FAMILIES.get(task) == RULER)
        ]
        if known:
            parts.append(
                f"The uncompressed model gets right, at least in part: {', '.join(known)}.\n"
            )
        if all_tasks := [cell for cell in of_prompts if cell.task == ALL]:
            parts.append(budget_table(all_tasks))
        if rules := rules_table(of_lines):
            parts += [_OF_RULES, rules]
        for task in tasks if len(tasks) > 1 or not all_tasks else ():
            of_task = [cell for cell in of_prompts if cell.task == task]
            parts += [f"`{task}`:\n", budget_table(of_task)]
    return "\n".join(parts)


def pooled_markdown(results: Sequence[Line]) -> str:
    """Return tables of `pooled` lines: each system by bytes, and the differences between them."""
    parts = []
    for model in dict.fromkeys(line["model"] for line in results):
        of_model = [line for line in results if line["model"] == model]
        parts += [f"## {model}, question first and last together\n", _OF_POOLED]
        parts += bytes_tables(cells(of_model))
        for title, positions in (
            ("from the 33rd output token on", POSITION_RANGES[AFTER_LOOKAHEAD]),
            ("over all output tokens after the first", AFTER_FIRST),
        ):
            rows = [
                [
                    *(f"`{method}`, {budget:g}" for method, budget in systems),
                    str(top1.prompts),
                    f"{tokens:,}",
                    with_interval(top1, "+.2%").replace("%", ""),
                    with_interval(kl, "+.4f"),
                ]
                for systems, (top1, kl, tokens) in differences(of_model, positions).items()
            ]
            header = ["first", "second", "prompts", "tokens", "equal tokens", "KL"]
            table = markdown_table(header, rows, text_columns=2)
            parts += [f"Differences {title}:\n", table]
    return "\n".join(parts)


def cell_table(found: Sequence[Cell], columns: Columns) -> str:
    """Return a table with a row per cell, without columns that are empty in all rows."""
    rows = [{title: text(cell) for title, text in columns.items()} for cell in found]
    header = [title for title in columns if any(row[title] for row in rows)]
    return markdown_table(header, [[row[title] for title in header] for row in rows])


_SYSTEM: Columns = {
    "method": lambda cell: f"`{cell.method}`",
    "budget": lambda cell: f"{cell.budget:g}",
}


def _at(positions: str) -> Callable[[Cell], str]:
    def text(cell: Cell) -> str:
        stats = cell.along.get(positions)
        if stats is None:
            return ""
        return f"{with_interval(stats.kl, '.2f')}; {with_interval(stats.top1, '.0%')}"

    return text


_BY_POSITION: Columns = {
    **_SYSTEM,
    **{f"tokens {name}": _at(name) for name in POSITION_RANGES},
    "similarity": lambda cell: with_interval(cell.similarity, ".2f"),
    "length": lambda cell: with_interval(cell.length, ".2f"),
    "loops": lambda c: "" if c.loops is None else f"{c.loops:.0%} ({c.full_loops:.0%})",
}


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
        of_task = sorted((c for c in found if c.task == task), key=lambda cell: -cell.budget)
        prompts = max(cell.same.prompts for cell in of_task)
        parts += [f"{task}, {prompts} prompts:\n", cell_table(of_task, _BY_POSITION)]
    return parts


def late_kl(cell: Cell) -> Estimate | None:
    """Return the KL behind a look-ahead; that of all tokens if it is not known by position."""
    return cell.along[AFTER_LOOKAHEAD].kl if AFTER_LOOKAHEAD in cell.along else cell.kl


def late_top1(cell: Cell) -> Estimate | None:
    """Return the share of equal tokens behind a look-ahead."""
    return cell.along[AFTER_LOOKAHEAD].top1 if AFTER_LOOKAHEAD in cell.along else None


_BY_BYTES: Columns = {
    **_SYSTEM,
    "bytes": lambda cell: f"{cell.bytes or 0.0:.3f}",
    "score": lambda cell: with_interval(cell.score, ".1%"),
    "KL": lambda cell: with_interval(late_kl(cell), ".3f"),
    "equal tokens": lambda cell: with_interval(late_top1(cell), ".1%"),
    "F1": lambda cell: with_interval(cell.answer_f1, ".0%"),
    "same": lambda cell: _mean(cell.answer_same),
}


def _mean(found: Estimate | None, form: str = ".0%") -> str:
    return "" if found is None else format(found.mean, form)


_SUMMARY: Mapping[str, tuple[str, float]] = {
    "fp8 alone, 0.5": ("fp8", 1.0),
    "k4v3, all tokens, 0.26": (K4V3_ALL, 1.0),
    **{
        f"{name.removesuffix(', evicting')}, {share:g}": (name, share)
        for share in (0.2, 0.1)
        for name in (SIXTEEN_BITS, FP8_EVICTING, K4V3)
    },
}
"""By column title: the method and the bytes or budget of its cells."""
_OF_FAMILY: Mapping[str, tuple[str, Callable[[Cell], str]]] = {
    "RULER": (RULER, lambda cell: _mean(cell.score)),
    "reasons, F1": (REASONS, lambda cell: _mean(cell.answer_f1)),
    "reasons, KL": (REASONS, lambda cell: _mean(late_kl(cell), ".3f")),
    "second turn, F1": (SECOND_TURNS, lambda cell: _mean(cell.answer_f1)),
}
"""By title of a row: the family of tasks, and the text of its cells."""


def summary_table(found: Sequence[Cell]) -> str:
    """Return the table of the documentation: figures of each model at equal bytes."""
    rows = []
    for model in dict.fromkeys(cell.model for cell in found):
        for title, (task, text) in _OF_FAMILY.items():
            of_task = {(c.method, c.budget): c for c in found if (c.model, c.task) == (model, task)}
            of_row = [of_task.get(key) for key in _SUMMARY.values()]
            rows.append([f"{model}: {title}", *("" if c is None else text(c) for c in of_row)])
    return markdown_table(["model: task", *_SUMMARY], rows)


def bytes_tables(found: Sequence[Cell]) -> list[str]:
    """Return a title and a table for all ordinary requests together, and for each other task.

    Args:
        found: cells of one model, prompt length and question position.
    """
    parts = []
    for task in dict.fromkeys(cell.task for cell in found if cell.bytes is not None):
        if task == ALL or task in INSTRUCTIONS:
            continue
        of_task = [cell for cell in found if cell.task == task and cell.bytes is not None]
        of_task.sort(key=lambda cell: -(cell.bytes or 0.0))
        prompts = max(cell.same.prompts for cell in of_task)
        parts += [f"{task}, {prompts} prompts, by bytes:\n", cell_table(of_task, _BY_BYTES)]
    return parts


def rules_table(results: Sequence[Line]) -> str:
    """Return a table with a row per task and rule, or "" if no task has rules.

    Args:
        results: lines of one model, prompt length and question position.
    """
    by_cell: dict[tuple[str, float], list[RuleResults]] = {}
    for line in results:
        if "rules" in line:
            ruled = RuleResults(line["task"], line["rules"], sampling_group(line))
            by_cell.setdefault((line["method"], line["budget"]), []).append(ruled)
    if not by_cell:
        return ""
    shares = [shares_obeyed(prompts) for prompts in by_cell.values()]
    rows = []
    for name in dict.fromkeys(name for by_rule in shares for name in by_rule):
        found = [by_rule.get(name) for by_rule in shares]
        counts = dict.fromkeys(str(share.prompts) for share in found if share)
        rows.append([name, ", ".join(counts), *(with_interval(share, ".0%") for share in found)])
    header = ["rule", "prompts", *(f"`{method}` {budget:g}" for method, budget in by_cell)]
    return markdown_table(header, rows)


def budget_table(found: Sequence[Cell]) -> str:
    """Return a table with a row per method and a column per budget, the best method first."""
    budgets = sorted({cell.budget for cell in found}, reverse=True)
    by = {(cell.method, cell.budget): cell for cell in found}
    scored = any(cell.score for cell in found)
    max_prompts = max((cell.score.prompts for cell in found if cell.score), default=0)

    def rank(method: str) -> tuple[float, ...]:
        cells_of = [by.get((method, b)) for b in (budgets[len(budgets) // 2], budgets[-1])]
        scores = [-cell.score.mean if cell and cell.score else 0.0 for cell in cells_of]
        if not any(scores):
            scores = [cell.kl.mean if cell and cell.kl else 0.0 for cell in cells_of]
        return tuple(scores)

    def score(cell: Cell | None) -> str:
        if cell is None or cell.score is None:
            return ""
        text, prompts = with_interval(cell.score, ".0%"), cell.score.prompts
        return text if prompts == max_prompts else f"{text[:-1]}, of {prompts} prompts)"

    rows = []
    for method in sorted(dict.fromkeys(cell.method for cell in found), key=rank):
        label = f"**`{method}`**" if method in (RECOMMENDED, WITHOUT_LOOKAHEAD) else f"`{method}`"
        of_method = [by.get((method, budget)) for budget in budgets]
        kl = [f"{cell.kl.mean:.3f}" if cell and cell.kl else "" for cell in of_method]
        rows.append([label, *(score(cell) for cell in of_method if scored), *kl])
    titles = [*(f"score, {b:g}" for b in budgets if scored), *(f"KL, {b:g}" for b in budgets)]
    return markdown_table(["method", *titles], rows)


if __name__ == "__main__":
    main()
