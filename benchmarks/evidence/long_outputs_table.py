"""Tables of `benchmarks.evidence.long_outputs`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.cells import lines
from vllm_kvcompress.compare.statistics import Estimate, estimate

Line = Mapping[str, Any]
OURS = "cake-chunk"


def report(paths: Sequence[Path]) -> str:
    """Return Markdown tables of all results, one for each model, kind of prompt and budget."""
    results = [line for path in paths for line in lines(path) if "kl" in line]
    parts = []
    for has_facts, name in ((False, "requests"), (True, "texts with hidden numbers")):
        for model in dict.fromkeys(line["model"] for line in results):
            of_model = [line for line in results if line["model"] == model]
            found = [line for line in of_model if ("known" in line) == has_facts]
            parts += _tables(model, name, found)
    return "\n".join(parts)


def _tables(model: str, name: str, found: Sequence[Line]) -> list[str]:
    parts = []
    budgets = dict.fromkeys(
        (line["prompt_budget"], line["decode_budget"])
        for line in found
        if line["decode_budget"] is not None
    )
    unbounded = [line for line in found if line["decode_budget"] is None]
    for prompt_budget, decode_budget in budgets:
        of_budget = [
            line
            for line in found
            if (line["prompt_budget"], line["decode_budget"]) == (prompt_budget, decode_budget)
        ]
        prompts = len({line["item"] for line in of_budget})
        parts += [
            f"**{model}, {prompts} {name}, prompt budget {prompt_budget:g}, decode budget"
            f" {decode_budget}**\n",
            table([*of_budget, *unbounded]),
        ]
    return parts


def table(found: Sequence[Line]) -> str:
    """Return a Markdown table with a row for each system.

    KL and equal tokens have 95 % intervals over prompts. The difference is the system's mean KL
    minus that of `cake-chunk` for the same prompts.
    """
    by_system: dict[str, list[Line]] = {}
    for line in found:
        by_system.setdefault(line["system"], []).append(line)
    ours = {line["item"]: _mean(line["kl"]) for line in by_system.get(OURS, ())}
    rows = [
        [
            "",
            "KL in each quarter",
            "KL",
            f"minus `{OURS}`'s",
            "equal tokens",
            "bytes",
            "bytes in the last quarter",
        ]
    ]
    rows.append(["---", *["---:"] * (len(rows[0]) - 1)])
    with_facts = any("known" in line for line in found)
    if with_facts:
        for cell, row in zip(("numbers found", "---:"), rows, strict=True):
            row.append(cell)
    for system, of_system in by_system.items():
        quarters = zip(*(line["kl"] for line in of_system), strict=True)
        paired = [line for line in of_system if line["item"] in ours]
        difference = ""
        if system != OURS and paired:
            values = [_mean(line["kl"]) - ours[line["item"]] for line in paired]
            difference = _interval(_estimate(values, paired), "{:+.4f}")
        row = [
            f"`{system}`",
            ", ".join(f"{_mean(values):.4f}" for values in quarters),
            _interval(_estimate([_mean(line["kl"]) for line in of_system], of_system), "{:.4f}"),
            difference,
            _interval(_estimate([_mean(line["equal"]) for line in of_system], of_system), "{:.1%}"),
            f"{_mean([_mean(line['bytes']) for line in of_system]):.2f}",
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
