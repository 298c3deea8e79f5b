"""Tables of `benchmarks.chats`."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, quantiles

from benchmarks.jsonl import Line, by_key, lines
from vllm_kvcompress.compare.statistics import Estimate, estimate
from vllm_kvcompress.compare.tables import markdown_table, with_interval

ALONE = "vLLM alone"
PRESSURE, WARM = "pressure", "warm"


def report(paths: Sequence[Path]) -> str:
    """Return Markdown tables of all parts of all files."""
    parts = []
    for path in paths:
        found = list(lines(path))
        for part, table in ((PRESSURE, pressure_table), (WARM, warm_table)):
            of_part = [line for line in found if line.get("part") == part]
            if of_part:
                parts.append(table(of_part))
    return "\n".join(parts)


def pressure_table(found: Sequence[Line]) -> str:
    """Return a table with a column for each system, about turns that have a history."""
    columns = [["", *_PRESSURE_ROWS]]
    for system, of_system in by_key(found, "system").items():
        totals = [line for line in of_system if "wall_s" in line]
        turns = [line for line in of_system if "turn" in line]
        columns.append([system, *_figures(turns, totals)])
    header, *rows = zip(*columns, strict=True)
    return markdown_table(header, rows)


_PRESSURE_ROWS = (
    "KV blocks",
    "hit rate of later turns",
    "warm chats, by turn",
    "cached tokens of a later turn, mean by turn",
    "computed tokens of a later turn, mean",
    "first token of a later turn, median",
    "first token of a later turn, 90 % are faster",
    "prefix-cache hits, of queried tokens",
    "preemptions",
    "all turns",
)


def _figures(turns: Sequence[Line], totals: Sequence[Line]) -> list[str]:
    """Return a system's cells of the pressure table; `totals` is empty in an unfinished run."""
    later = [line for line in turns if line["turn"] > 1]
    by_turn = [of_turn for _, of_turn in sorted(by_key(later, "turn").items())]
    first_token = [line["first_token_s"] for line in later]
    computed = [line["prompt_tokens"] - line["cached_tokens"] for line in later]
    total = totals[-1] if totals else None
    return [
        str(total["blocks"]) if total else "",
        with_interval(hit_rate(later), ".0%"),
        ", ".join(f"{sum(map(is_warm, of_turn))} of {len(of_turn)}" for of_turn in by_turn),
        ", ".join(f"{fmean(line['cached_tokens'] for line in turn):.0f}" for turn in by_turn),
        f"{fmean(computed):.0f}",
        f"{median(first_token):.2f} s",
        f"{quantiles(first_token, n=10, method='inclusive')[-1]:.2f} s",
        f"{total['prefix_cache_hits']:,} of {total['prefix_cache_queries']:,}" if total else "",
        str(total["preemptions"]) if total else "",
        f"{sum(total['wall_s']):.0f} s" if total else "",
    ]


def is_warm(line: Line) -> bool:
    """Return whether at least half of a request's prompt came from the prefix cache."""
    return bool(2 * line["cached_tokens"] >= line["prompt_tokens"])


def hit_rate(found: Sequence[Line]) -> Estimate:
    """Return the cached share of prompt tokens, with an interval over chats."""
    return estimate(
        [line["cached_tokens"] for line in found],
        [line["chat"] for line in found],
        sizes=[line["prompt_tokens"] for line in found],
    )


def warm_table(found: Sequence[Line]) -> str:
    """Return a table of first-token times of warm turns, relative to vLLM alone's."""
    by_system: dict[str, dict[tuple[int, int], Line]] = {}
    for line in found:
        if line.get("turn", 1) > 1:
            by_system.setdefault(line["system"], {})[line["chat"], line["turn"]] = line
    header = ("", "warm turns", "computed tokens, mean", "first token, median", "of vLLM alone's")
    rows = []
    for system, requests in by_system.items():
        times = {key: line["first_token_s"] for key, line in requests.items()}
        alone = by_system[ALONE]
        ratios = [time / alone[key]["first_token_s"] for key, time in times.items()]
        low, middle, high = quantiles(ratios, n=4, method="inclusive")
        computed = [line["prompt_tokens"] - line["cached_tokens"] for line in requests.values()]
        rows.append(
            (
                system,
                f"{sum(map(is_warm, requests.values()))} of {len(requests)}",
                f"{fmean(computed):.0f}",
                f"{median(times.values()):.2f} s",
                f"{middle:.2f} times (quartiles {low:.2f} and {high:.2f})",
            )
        )
    return markdown_table(header, rows)
