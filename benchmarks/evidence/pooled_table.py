"""Tables of ordinary requests with the instruction first and last together."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from benchmarks.evidence.cells import AFTER_LOOKAHEAD, POSITION_RANGES, sampling_group
from vllm_kvcompress.compare.statistics import Estimate, estimate
from vllm_kvcompress.compare.tasks import ORDINARY as INSTRUCTIONS

BOTH = "first and last"
"""Stands for the question's position in lines that `pooled` returns."""
LEGEND = (
    "Instruction first and last together. Both prompts over one text are drawn together. Outputs"
    " that end before the tokens that count do not count. A difference is of the same tokens under"
    " both systems: the first minus the second, in percentage points of equal tokens and in nats"
    " per token. Its order is real if the interval excludes 0.\n"
)
System = tuple[str, float]
"""Method and budget."""
AFTER_FIRST = slice(1, None)
"""All output tokens that the compressed cache computes: the prefill computes the first one."""


def pooled(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of ordinary requests as if the question had one position in all."""
    return [
        {**line, "question": BOTH, "item": f"{line['question']}:{line['item']}"}
        for line in results
        if line["task"] in INSTRUCTIONS
    ]


def differences(
    lines: Sequence[Mapping[str, Any]],
    positions: slice = POSITION_RANGES[AFTER_LOOKAHEAD],
) -> dict[tuple[System, System], tuple[Estimate, Estimate, int]]:
    """Return by pair of systems the difference of equal tokens and of KL, and the token count.

    Args:
        lines: results of one model over ordinary requests.
        positions: the output tokens that count.
    """
    systems: dict[System, dict[Any, Mapping[str, Any]]] = {}
    for line in lines:
        if "kl_at" in line:
            key = (line["question"], line["seed"], line["item"])
            systems.setdefault((line["method"], line["budget"]), {})[key] = line

    def tokens(line: Mapping[str, Any]) -> tuple[int, float, int]:
        agreed = ("1" + line["agreed_at"])[positions]
        return agreed.count("1"), sum([0.0, *line["kl_at"]][positions]), len(agreed)

    found = {}
    for one, other in combinations(systems, 2):
        shared = [(line, systems[other].get(key)) for key, line in systems[one].items()]
        pairs = [
            (sampling_group(line), tokens(line), tokens(matching))
            for line, matching in shared
            if matching is not None and tokens(line)[2]
        ]
        if not pairs:
            continue
        groups, sizes = [group for group, _, _ in pairs], [a[2] for _, a, _ in pairs]
        top1, kl = (
            estimate([a[i] - b[i] for _, a, b in pairs], groups, sizes=sizes) for i in (0, 1)
        )
        found[one, other] = top1, kl, sum(sizes)
    return found


def differences_table(found: Mapping[tuple[System, System], tuple[Estimate, Estimate, int]]) -> str:
    """Return `differences` as a Markdown table."""
    rows = [["first", "second", "prompts", "tokens", "equal tokens", "KL"], ["---"] * 2]
    rows[1] += ["---:"] * 4
    for (one, other), (top1, kl, tokens) in found.items():
        rows.append(
            [
                *(f"`{method}`, {budget:g}" for method, budget in (one, other)),
                str(top1.prompts),
                f"{tokens:,}",
                f"{top1.mean * 100:+.2f} ({top1.low * 100:+.2f} to {top1.high * 100:+.2f})",
                f"{kl.mean:+.4f} ({kl.low:+.4f} to {kl.high:+.4f})",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
