"""A table of rules that are still obeyed."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.evidence.cells import drawn_with
from vllm_kvcompress.compare.obeyed import Ruled, shares_obeyed

LEGEND = (
    "Rules that a program checks: of the prompts in which the uncompressed model obeys the rule,"
    " the share in which the compressed model obeys it, too, with its 95 % interval. Prompts: the"
    " number of prompts in which the uncompressed model obeys the rule.\n"
)


def obeyed(results: Sequence[Mapping[str, Any]]) -> str:
    """A table with a row for each task and each of its rules; empty where there are none.

    Args:
        results: lines of one model, length and place of the question.
    """
    by_cell: dict[tuple[str, float], list[Ruled]] = {}
    for line in results:
        if "rules" in line:
            ruled = Ruled(line["task"], line["rules"], drawn_with(line))
            by_cell.setdefault((line["method"], line["budget"]), []).append(ruled)
    if not by_cell:
        return ""
    shares = [shares_obeyed(prompts) for prompts in by_cell.values()]
    rows = [["rule", "prompts", *(f"`{method}` {budget:g}" for method, budget in by_cell)]]
    rows.append(["---", *["---:"] * (len(by_cell) + 1)])
    for name in dict.fromkeys(name for each in shares for name in each):
        found = [each.get(name) for each in shares]
        counts = dict.fromkeys(str(share.prompts) for share in found if share)
        told = [
            f"{share.mean:.0%} ({share.low:.0%} to {share.high:.0%})" if share else ""
            for share in found
        ]
        rows.append([name, ", ".join(counts), *told])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
