"""The tables of `quality.py`: for the console, and as a file of benchmarks/results."""

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

FULL = "full cache"


def grid(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table: a method's needles in per cent and its KL at each budget."""
    by = {(pair["method"], pair["budget"]): pair for pair in results["pairs"]}
    methods = list(dict.fromkeys(m for m, _ in by if m != FULL))
    budgets = sorted({b for m, b in by if m != FULL}, reverse=True)
    header = ["method", *(f"{what}, {b:g}" for what in ("needles", "KL") for b in budgets)]

    def row(title: str, found: Sequence[dict[str, Any] | None]) -> list[str]:
        shares = [f"{p['needles_answered'] / max(p['needles'], 1):.0%}" if p else "" for p in found]
        return [title, *shares, *(_kl(p) if p else "" for p in found)]

    rows = [row(FULL, [by.get((FULL, 1.0))] * len(budgets))]
    return header, rows + [row(m, [by.get((m, b)) for b in budgets]) for m in methods]


def _kl(pair: dict[str, Any]) -> str:
    """Mean over the texts and, since one text can outweigh the others, the median text."""
    return f"{pair['kl']:.3f} ({statistics.median(pair['kl_of_each_text']):.3f})"


def markdown(results: dict[str, Any]) -> str:
    header, rows = grid(results)
    needles, run, texts = results["needles"], results["run"], results["texts"]["tokens"]
    compared = run["forced_tokens"] - 1  # the first token is the prefill's
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    depths = ", ".join(f"{answered} at {depth}" for depth, answered in needles["by_depth"].items())
    commits = sorted({pair["commit"] for pair in results["pairs"]})
    return f"""# Quality

Needles answered, of {needles["found"]} that the full cache answers, and KL divergence from the full
cache in nats per token over {compared} tokens of each of {len(texts)} texts, by budget: the mean,
and the median text in brackets.

{table}

* {needles["asked"]} needle prompts were tried, and the full cache answered
  {needles["full_cache_pass_rate"]:.0%}; by the needle's place in the prompt: {depths}.
* Needle prompts: {spread(needles["tokens"])}. Texts: {spread(texts)}.
* {run["model"]}, float32, greedy, blocks of {run["block_size"]} tokens; phrasing {run["phrasing"]},
  seed {run["seed"]}.
* {results["machine"]}; commit {", ".join(commits)}; {results["date"]}.
* {", ".join(f"`{command}`" for command in results["commands"])}
"""


def spread(lengths: Sequence[int]) -> str:
    return f"{min(lengths, default=0)} to {max(lengths, default=0)} tokens"


def console_table(results: dict[str, Any]) -> Table:
    header, rows = grid(results)
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    return table
