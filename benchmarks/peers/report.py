"""Report the results of both sides as Markdown tables."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.exchange import FULL, KVPRESS, OURS, Result
from vllm_kvcompress.compare.tables import markdown_table

Pairs = dict[tuple[str, str], dict[float, dict[str, Any]]]
"""Side and method, then budget, to that pair's summary."""


def summaries(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One line for each side, method and budget, in the order of `results`."""
    groups: dict[tuple[str, str, float], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.side, result.method, result.budget].append(result)
    return [
        {"side": side, "method": method, "budget": budget, **summary(group)}
        | ({"ours": best_of_ours(results, group)} if side == KVPRESS and method != FULL else {})
        for (side, method, budget), group in groups.items()
    ]


def best_of_ours(results: Sequence[Result], group: Sequence[Result]) -> dict[str, Any]:
    """Return our methods' maximum of answered needles and minimum KL on a press's prompts.

    Args:
        group: results of one press at one budget. It may cover fewer prompts than our results.
    """
    prompts, budget = {result.prompt for result in group}, group[0].budget
    by_method: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if (result.side, result.budget) == (OURS, budget) and result.prompt in prompts:
            by_method[result.method].append(result)
    summaries_of_ours = [summary(found) for method, found in by_method.items() if method != FULL]
    divergences = [each["kl"] for each in summaries_of_ours if each["kl"] is not None]
    return {
        "needles_answered": max(
            (each["needles_answered"] for each in summaries_of_ours), default=0
        ),
        "kl": min(divergences, default=None),
    }


def summary(group: Sequence[Result]) -> dict[str, Any]:
    """Return answered needles, mean KL of texts, kept tokens and cache bytes."""
    needles = [result for result in group if result.answered is not None]
    texts = [statistics.fmean(result.kl) for result in group if result.kl]
    kept = [statistics.fmean(result.kept) / result.tokens for result in group]
    notes = sorted({result.note for result in group if result.note})
    return {
        "needles_answered": sum(bool(result.answered) for result in needles),
        "needles": len(needles),
        "kl": statistics.fmean(texts) if texts else None,
        "texts": len(texts),
        "kept": round(statistics.fmean(kept), 4),
        "cache_of_full": round(
            sum(result.cache_bytes for result in group)
            / sum(result.full_bytes for result in group),
            4,
        ),
        "notes": {note: sum(result.note == note for result in group) for note in notes},
    }


def paired(lines: Sequence[Mapping[str, Any]]) -> Pairs:
    out: Pairs = defaultdict(dict)
    for line in lines:
        out[line["side"], line["method"]][line["budget"]] = dict(line)
    return dict(out)


def better(pairs: Pairs, key: tuple[str, str], budgets: Sequence[float]) -> str:
    """Return measures and budgets where a press beats all our methods on the same prompts."""
    wins = []
    for name, sign in (("needles_answered", 1), ("kl", -1)):
        budgets_won = []
        for budget in budgets:
            line = pairs[key].get(budget, {})
            theirs, ours = line.get(name), line.get("ours", {}).get(name)
            if theirs is not None and ours is not None and _exceeds(theirs, ours, sign):
                budgets_won.append(f"{budget:g}")
        if budgets_won:
            wins.append(f"{'needles' if name != 'kl' else 'KL'} at {', '.join(budgets_won)}")
    return "; ".join(wins)


def _exceeds(theirs: float, ours: float, sign: int) -> bool:
    """Return True if a press is better by more than rounding between transformers versions."""
    return sign * (theirs - ours) > 1e-3 * abs(ours)


def markdown(results: Mapping[str, Any]) -> str:
    """Return the report: its origin, and the quality of all methods."""
    budgets: list[float] = results["budgets"]
    pairs = paired(results["pairs"])
    rows = []
    for side in (KVPRESS, OURS):
        for (owner, method), by_budget in pairs.items():
            if owner != side:
                continue
            if method == FULL:  # measured once
                by_budget = dict.fromkeys(budgets, next(iter(by_budget.values())))
            is_press = side == KVPRESS and method != FULL
            won = better(pairs, (owner, method), budgets) if is_press else ""
            rows.append([f"{side}: {method}", *_cells(by_budget, budgets), won])
    titles = [f"needles {b:g}" for b in budgets] + [f"KL {b:g}" for b in budgets]
    parts = [
        "# kvpress and this plugin, with the same prompts and as many kept tokens\n",
        f"{results['model']}, float32; {results['prompts']}. kvpress {results['kvpress']} on"
        f" transformers {results['transformers']['kvpress']}, ours (`vllm_kvcompress.offline`) on"
        f" {results['transformers']['ours']}, decoded by the same loop.",
        f"{results['machine']}; commit {results['commit']}; `{results['command']}`.\n",
        "Needles: numbers found, of those that the uncompressed model finds. KL: nats per token"
        " from the uncompressed model's distributions, along its own text. Cache: bytes after"
        f" compression, relative to the uncompressed cache, at {budgets[-1]:g}. Ours are all"
        " presets except h2o and d2o, which have no counterpart in kvpress.\n",
        markdown_table(["", *titles, "cache", "better than every method of ours"], rows),
        *_notes(pairs),
    ]
    return "\n".join(parts) + "\n"


def _cells(by_budget: Mapping[float, Mapping[str, Any]], budgets: Sequence[float]) -> list[str]:
    lines = [by_budget.get(budget) for budget in budgets]
    needles = [f"{x['needles_answered']}/{x['needles']}" if x else "-" for x in lines]
    kl = [f"{x['kl']:.3f}" if x and x["kl"] is not None else "-" for x in lines]
    smallest = lines[-1]
    size = f"{smallest['cache_of_full']:.2f}" if smallest else "-"
    return [*needles, *kl, size]


def _notes(pairs: Pairs) -> list[str]:
    out = []
    for (side, method), by_budget in pairs.items():
        if side != KVPRESS:
            continue
        for note in sorted({note for line in by_budget.values() for note in line["notes"]}):
            budgets = [f"{b:g}" for b, line in by_budget.items() if note in line["notes"]]
            out.append(f"* {method}, at {', '.join(budgets)}: {note}.")
    return out
