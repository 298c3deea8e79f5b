"""Tables of `benchmarks.evidence.second_turns`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.cells import lines
from vllm_kvcompress.compare.statistics import Estimate, estimate

Line = Mapping[str, Any]
BASELINE = "fp8"
_TITLES = ("system", "chats, tokens", "KL", f"minus `{BASELINE}`'s", "equal tokens", "numbers")


def report(paths: Sequence[Path]) -> str:
    """Return Markdown tables: for each model, one of all chats and one of each kind."""
    results = [line for path in paths for line in lines(path)]
    parts = []
    for model in dict.fromkeys(line["model"] for line in results):
        of_model = [line for line in results if line["model"] == model]
        parts += [f"**{model}, all chats**\n", table(of_model)]
        for kind in dict.fromkeys(line["kind"] for line in of_model):
            of_kind = [line for line in of_model if line["kind"] == kind]
            parts += [f"**{model}, {kind}**\n", table(of_kind)]
    return "\n".join(parts)


def table(found: Sequence[Line]) -> str:
    """Return a Markdown table with a row for each system.

    KL is in nats per token. KL and equal tokens are means over all tokens of the second replies,
    with 95 % intervals over chats. The difference is the system's KL minus the baseline's for the
    same chats.
    """
    by_system: dict[str, list[Line]] = {}
    for line in found:
        by_system.setdefault(line["system"], []).append(line)
    baseline = {line["chat"]: sum(line["kl"]) for line in by_system.get(BASELINE, ())}
    rows: list[Sequence[str]] = [_TITLES, ["---", *["---:"] * (len(_TITLES) - 1)]]
    for system, of_system in by_system.items():
        paired = [line for line in of_system if line["chat"] in baseline and system != BASELINE]
        differences = [sum(line["kl"]) - baseline[line["chat"]] for line in paired]
        with_numbers = [line["found"] for line in of_system if "found" in line]
        rows.append(
            [
                f"`{system}`",
                f"{len(of_system)}, {sum(len(line['kl']) for line in of_system)}",
                _interval(_per_token([sum(line["kl"]) for line in of_system], of_system), ".4f"),
                _interval(_per_token(differences, paired), "+.4f") if paired else "",
                _interval(
                    _per_token([line["agreed"].count("1") for line in of_system], of_system), ".1%"
                ),
                f"{sum(with_numbers)} of {len(with_numbers)}" if with_numbers else "",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _per_token(sums: Sequence[float], found: Sequence[Line]) -> Estimate:
    """Return the mean per token of sums over the tokens of each chat."""
    groups = [line["chat"] for line in found]
    return estimate(sums, groups, sizes=[len(line["kl"]) for line in found])


def _interval(value: Estimate, form: str) -> str:
    mean, low, high = (format(number, form) for number in (value.mean, value.low, value.high))
    return f"{mean} ({low} to {high})"
