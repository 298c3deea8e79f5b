"""Tables of `benchmarks.evidence.long_outputs`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.cells import lines
from vllm_kvcompress.compare.statistics import Estimate, estimate

Line = Mapping[str, Any]
OURS = "cake-chunk"
_TITLES = (
    "",
    "prompts",
    "KL in each quarter",
    "KL",
    f"minus `{OURS}`'s",
    "equal tokens",
    "bytes, last quarter",
)


def report(paths: Sequence[Path]) -> str:
    """Return Markdown tables of all results, one for each model, kind of prompt and budget."""
    results = [line for path in paths for line in lines(path) if "kl" in line]
    parts = []
    for model in dict.fromkeys(line["model"] for line in results):
        of_model = [line for line in results if line["model"] == model]
        for has_facts, name in ((False, "requests"), (True, "texts with hidden numbers")):
            found = [line for line in of_model if ("known" in line) == has_facts]
            parts += _tables(f"{model}, {name}", found)
    return "\n".join(parts)


def _tables(title: str, found: Sequence[Line]) -> list[str]:
    """Return a title and a table for each pair of a prompt budget and a decode budget."""
    parts = []
    bounded = [line for line in found if line["decode_budget"] is not None]
    unbounded = [line for line in found if line["decode_budget"] is None]
    for budgets in dict.fromkeys(map(_budgets, bounded)):
        of_budgets = [line for line in bounded if _budgets(line) == budgets]
        items = {line["item"] for line in of_budgets}
        lengths = dict.fromkeys(line["output_tokens"] for line in of_budgets)
        parts += [
            f"**{title}, outputs of {', '.join(map(str, lengths))} tokens, prompt budget"
            f" {budgets[0]:g}, decode budget {budgets[1]}**\n",
            table([*of_budgets, *(line for line in unbounded if line["item"] in items)]),
        ]
    return parts


def _budgets(line: Line) -> tuple[float, int]:
    return line["prompt_budget"], line["decode_budget"]


def table(found: Sequence[Line]) -> str:
    """Return a Markdown table with a row for each system.

    KL and equal tokens are means over the output, with 95 % intervals over prompts. The difference
    is the system's KL minus that of `cake-chunk` for the same prompts. Bytes are relative to a
    16-bit cache of all tokens.
    """
    by_system: dict[str, list[Line]] = {}
    for line in found:
        by_system.setdefault(line["system"], []).append(line)
    ours = {line["item"]: _mean(line["kl"]) for line in by_system.get(OURS, ())}
    with_facts = any("known" in line for line in found)
    titles = [*_TITLES, *(["numbers found"] if with_facts else [])]
    rows = [titles, ["---", *["---:"] * (len(titles) - 1)]]
    for system, of_system in by_system.items():
        quarters = zip(*(line["kl"] for line in of_system), strict=True)
        kl = [_mean(line["kl"]) for line in of_system]
        paired = [line for line in of_system if line["item"] in ours and system != OURS]
        differences = [_mean(line["kl"]) - ours[line["item"]] for line in paired]
        row = [
            f"`{system}`",
            str(len(of_system)),
            ", ".join(f"{_mean(values):.4f}" for values in quarters),
            _interval(_estimate(kl, of_system), "{:.4f}"),
            _interval(_estimate(differences, paired), "{:+.4f}") if paired else "",
            _interval(_estimate([_mean(line["equal"]) for line in of_system], of_system), "{:.1%}"),
            f"{_mean([line['bytes'][-1] for line in of_system]):.2f}",
        ]
        if with_facts:
            known = sum(line["known"] for line in of_system)
            row.append(f"{sum(line['found'] for line in of_system)} of {known}")
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _estimate(values: Sequence[float], found: Sequence[Line]) -> Estimate:
    return estimate(values, [line["group"] for line in found])


def _interval(value: Estimate, form: str) -> str:
    mean, low, high = (form.format(number) for number in (value.mean, value.low, value.high))
    return f"{mean} ({low} to {high})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
