"""Of the rules that the full cache obeys, which share the compressed ones obey too."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_kvcompress.compare.statistics import estimate

LEGEND = (
    "Rules of prompts that a program checks: of those that the full cache obeys, the share that is"
    " obeyed too, with its 95 % interval. Prompts: those in which the full cache obeys the rule.\n"
)


def obeyed(results: Sequence[Mapping[str, Any]]) -> str:
    """A table with a row for each task and each of its rules; empty where there are none.

    Args:
        results: lines of one model, length and place of the question.
    """
    ruled = [line for line in results if "rules" in line]
    if not ruled:
        return ""
    cells = list(dict.fromkeys((line["method"], line["budget"]) for line in ruled))
    rows = [["rule", "prompts", *(f"`{method}` {budget:g}" for method, budget in cells)]]
    rows.append(["---", *["---:"] * (len(cells) + 1)])
    for task in dict.fromkeys(line["task"] for line in ruled):
        of_task = [line for line in ruled if line["task"] == task]
        rules = list(dict.fromkeys(rule for line in of_task for rule in line["rules"]))
        every = [(f"`{task}`", rules), *((f"`{task}`: {rule}", [rule]) for rule in rules)]
        for name, some in every if len(rules) > 1 else every[:1]:
            row = [_share(of_task, some, cell) for cell in cells]
            counts = dict.fromkeys(count for count, _ in row)
            rows.append([name, ", ".join(map(str, counts)), *(told for _, told in row)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _share(
    lines: Sequence[Mapping[str, Any]], rules: Sequence[str], cell: tuple[str, float]
) -> tuple[int, str]:
    """Of some rules under one method and budget: prompts, and the share that is told."""
    kept, right, groups = [], [], []
    for line in lines:
        pairs = [line["rules"][rule] for rule in rules if rule in line["rules"]]
        count = sum(whole for _, whole in pairs)
        if (line["method"], line["budget"]) == cell and count:
            kept.append(sum(own and whole for own, whole in pairs))
            right.append(count)
            groups.append(f"{line.get('seed')}:{line['group'] or line['item']}")
    if not kept:
        return 0, ""
    found = estimate(kept, groups, sizes=right)
    return len(kept), f"{found.mean:.0%} ({found.low:.0%} to {found.high:.0%})"
