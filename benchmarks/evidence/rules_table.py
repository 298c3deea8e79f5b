"""Table of the rules that compressed models still obey."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.evidence.cells import sampling_group
from vllm_kvcompress.compare.statistics import RuleResults, shares_obeyed

LEGEND = (
    "Rules that a program checks: of the prompts in which the uncompressed model obeys the rule,"
    " the share in which the compressed model obeys it, too, with its 95 % interval. Prompts: the"
    " number of prompts in which the uncompressed model obeys the rule.\n"
)


def rules_table(results: Sequence[Mapping[str, Any]]) -> str:
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
    rows = [["rule", "prompts", *(f"`{method}` {budget:g}" for method, budget in by_cell)]]
    rows.append(["---", *["---:"] * (len(by_cell) + 1)])
    for name in dict.fromkeys(name for by_rule in shares for name in by_rule):
        found = [by_rule.get(name) for by_rule in shares]
        counts = dict.fromkeys(str(share.prompts) for share in found if share)
        cells = [
            f"{share.mean:.0%} ({share.low:.0%} to {share.high:.0%})" if share else ""
            for share in found
        ]
        rows.append([name, ", ".join(counts), *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
