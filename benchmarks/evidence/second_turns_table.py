"""Tables of `benchmarks.evidence.second_turns`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.jsonl import Line, by_key, lines
from vllm_kvcompress.compare.statistics import Estimate, mean
from vllm_kvcompress.compare.tables import markdown_table, with_interval

BASELINE = "fp8"
_TITLES = ("system", "chats, tokens", "KL", f"minus `{BASELINE}`'s", "equal tokens", "numbers")


def report(paths: Sequence[Path]) -> str:
    """Return Markdown tables: for each model, one of all chats and one of each kind."""
    parts, results = [], [line for path in paths for line in lines(path)]
    for model, of_model in by_key(results, "model").items():
        parts += [f"**{model}, all chats**\n", table(of_model)]
        for kind, of_kind in by_key(of_model, "kind").items():
            parts += [f"**{model}, {kind}**\n", table(of_kind)]
    return "\n".join(parts)


def table(found: Sequence[Line]) -> str:
    """Return a Markdown table with a row for each system.

    KL is in nats per token. KL and equal tokens are means over all tokens of the second replies,
    with 95 % intervals over chats. The difference is the system's KL minus the baseline's for the
    same chats.
    """
    by_system = by_key(found, "system")
    baseline = {line["chat"]: sum(line["kl"]) for line in by_system.get(BASELINE, ())}

    def per_token(of: Sequence[Line], value: Callable[[Line], float]) -> Estimate | None:
        return mean(of, value, lambda line: line["chat"], lambda line: len(line["kl"]))

    rows = []
    for system, of_system in by_system.items():
        paired = [line for line in of_system if line["chat"] in baseline and system != BASELINE]
        with_numbers = [line["found"] for line in of_system if "found" in line]
        kl = per_token(of_system, lambda line: sum(line["kl"]))
        more = per_token(paired, lambda line: sum(line["kl"]) - baseline[line["chat"]])
        equal = per_token(of_system, lambda line: line["agreed"].count("1"))
        rows.append(
            [
                f"`{system}`",
                f"{len(of_system)}, {sum(len(line['kl']) for line in of_system)}",
                with_interval(kl, ".4f"),
                with_interval(more, "+.4f"),
                with_interval(equal, ".1%"),
                f"{sum(with_numbers)} of {len(with_numbers)}" if with_numbers else "",
            ]
        )
    return markdown_table(_TITLES, rows)
