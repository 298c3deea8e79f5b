"""The tables of quality match the raw results."""

from pathlib import Path

import pytest

from benchmarks.evidence.cache_formats import CACHE_FORMATS
from benchmarks.evidence.cells import (
    AFTER_FIRST,
    AFTER_LOOKAHEAD,
    BOTH,
    ORDINARY,
    REASONS,
    cells,
    differences,
    pooled,
    read,
)
from benchmarks.evidence.harm_table import harm_tables, task_score
from benchmarks.evidence.harm_table import share as harm_share
from benchmarks.evidence.report import summary_table
from benchmarks.evidence.second_turns_table import report as second_turns
from benchmarks.evidence.systems import FP8_EVICTING, K4V3, K4V3_ALL, SIXTEEN_BITS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
EVICTING = {"16 bits": "cake-chunk", "k4v3": "cake-chunk, k4v3", "fp8": "cake-chunk, fp8"}
WITHOUT_LOOKAHEAD = "cake-chunk, lookahead 0"
DEMO, SECOND = "smollm2-135m-instruct", "qwen2.5-coder-0.5b"


@pytest.fixture(scope="module")
def settings():
    """Return the results of the systems that README recommends, which got more prompts."""
    return read([RESULTS / "settings_qwen2.jsonl.xz"])


@pytest.fixture(scope="module")
def measured(settings):
    """Return the second model's cells over all ordinary requests by method and budget."""
    newer = {(line["method"], line["budget"]) for line in settings}
    results = read([RESULTS / "formats_qwen2.jsonl.xz"])
    results = [line for line in results if (line["method"], line["budget"]) not in newer]
    return {
        (cell.method, cell.budget): cell
        for cell in cells(pooled(results + settings))
        if (cell.task, cell.question) == (ORDINARY, BOTH)
    }


def percent(estimate, decimals, unit=" %"):
    """Return a mean with its interval, as tables write them."""
    low, high = (f"{end * 100:.{decimals}f}" for end in (estimate.low, estimate.high))
    return f"{estimate.mean * 100:.{decimals}f}{unit} ({low} to {high})"


def rows(page, start_of_header):
    """Return the rows of a table, the header first."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(start_of_header))
    table = lines[start : lines.index("", start)]
    return [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_the_fields_tasks_matches_the_raw_results():
    found = cells(read([RESULTS / f"field_{name}.jsonl.xz" for name in ("smollm2", "qwen2")]))
    assert summary_table(found) in (RESULTS / "field.md").read_text()


def test_the_figures_of_harm_match_the_raw_results():
    found = read(
        [RESULTS / f"harm_{name}.jsonl.xz" for name in ("qwen2", "requests_qwen2", "smollm2")]
    )
    assert harm_tables(found) in (RESULTS / "harm.md").read_text()
    by_system = {}
    for line in found:
        if (line["task"], line["model"]) == ("arithmetic", SECOND):
            by_system.setdefault((line["method"], line["budget"]), []).append(line)

    def solved(method, budget=1.0):
        """Return a system's number of right results with its interval, as the page writes it."""
        score = task_score(by_system[method, budget])
        interval = harm_share(score).partition("(")[2].partition(")")[0].replace("%", "")
        return f"{round(score.mean * score.prompts)} ({interval} %)"

    text = " ".join((ROOT / "docs" / "measurements.md").read_text().split())
    prompts = len(by_system["full", 1.0])
    assert f"Of {prompts} problems of four steps, the second model solved {solved('full')}" in text
    assert f"{solved('fp8')} with fp8, {solved(K4V3_ALL)} with k4v3" in text
    assert f"{solved('cake-chunk, k4v3', 0.4)} with k4v3 at 0.4" in text
    sixteen = " and ".join(solved("cake-chunk", budget) for budget in (0.2, 0.1))
    assert f"{sixteen} with 16 bits at 0.2 and 0.1" in text


def test_the_tables_of_second_turns_match_the_raw_results():
    text = second_turns(
        [RESULTS / f"second_turns_{name}.jsonl.xz" for name in ("smollm2", "qwen2")]
    )
    assert text in (RESULTS / "second_turns.md").read_text()
    _, _, *table = rows("measurements.md", "| Model | `grid`, warm or cold")
    for model, (_, *cells_) in zip((DEMO, SECOND), table, strict=True):
        of_all = text.partition(f"**{model}, all chats**")[2].splitlines()[4:8]
        assert cells_ == [row.split("|")[3].split()[0] for row in of_all]


def test_the_table_of_formats_to_use_matches_the_raw_results():
    """KL of answers with reasons."""
    found = {
        (cell.method, cell.budget, cell.model): cell.along[AFTER_LOOKAHEAD].kl.mean
        for cell in cells(
            read([RESULTS / f"field_{name}.jsonl.xz" for name in ("smollm2", "qwen2")])
        )
        if cell.task == REASONS
    }
    _, _, *body = rows("measurements.md", "| Bytes | Use | KL")
    systems = [("fp8", 1.0), (K4V3_ALL, 1.0), (K4V3, 0.2), (FP8_EVICTING, 0.2)]
    for system, (*_, figures) in zip(systems, body, strict=True):
        assert figures == " and ".join(f"{found[*system, model]:.3f}" for model in (SECOND, DEMO))
    sixteen = " and ".join(f"{found[SIXTEEN_BITS, 0.2, model]:.3f}" for model in (SECOND, DEMO))
    assert f"16 bits with {sixteen}" in body[2][1]


def cache_format(name, kept):
    """Return method and budget of a table's row."""
    budget = int(kept.removesuffix(" %")) / 100
    if budget == 1.0 and name in CACHE_FORMATS:
        return name, budget
    if (name, budget) == ("k4v3", 1.0):  # packed as a server does it
        return f"{WITHOUT_LOOKAHEAD}, k4v3", budget
    return EVICTING[name], budget


def matches_bytes(share, cell):
    low, high = (float(share.split(" to ")[end]) for end in (0, -1))
    return low - 0.006 < cell.bytes < high + 0.006


def test_the_table_of_cache_formats_matches_the_raw_results(measured):
    header, _, *body = rows("measurements.md", "| Cache | Tokens kept")
    assert header[2:] == ["Bytes", "Outputs", "Match", "KL"]
    assert len(body) > 6
    for name, kept, share, *figures in body:
        key = cache_format(name, kept)
        top1, kl = (getattr(measured[key].along[AFTER_LOOKAHEAD], of) for of in ("top1", "kl"))
        of_kl = f"{kl.mean:.3f} ({kl.low:.3f} to {kl.high:.3f})"
        assert figures == [str(top1.prompts), percent(top1, 1), of_kl], key
        assert matches_bytes(share, measured[key]), key


def test_the_notes_on_orders_match_the_raw_results(settings):
    balanced = ("cake-chunk, k4v3", 0.6)
    order = [(f"{WITHOUT_LOOKAHEAD}, k4v3", 1.0), balanced, ("cake-chunk, k4v3", 0.4)]
    order.append(("cake-chunk", 0.2))
    lines = pooled([line for line in settings if line["method"] != "fp8"])
    found = differences(lines)
    worse = {}  # points of match that the later row of the table loses to the earlier one
    for (one, other), (top1, kl, _) in found.items():
        sign = 1 if order.index(one) < order.index(other) else -1
        assert max(sign * kl.low, sign * kl.high) < 0, (one, other)
        ends = sorted((sign * top1.low, sign * top1.high))
        worse[frozenset((one, other))] = [100 * each for each in (sign * top1.mean, *ends)]
    of_sixteen_bits = [worse.pop(frozenset((order[3], each))) for each in order[:3]]
    mean, low, high = min(of_sixteen_bits)
    assert low > 0
    text = " ".join((ROOT / "docs" / "measurements.md").read_text().split())
    assert f"each k4v3 row, by {mean:.1f} points ({low:.1f} to {high:.1f}) or more" in text
    mean, low, high = min(worse.pop(frozenset((order[2], each))) for each in order[:2])
    assert low > 0
    text_of_40 = (
        f"k4v3 at 40 % less than the others, by {mean:.1f} points ({low:.1f} to {high:.1f})"
    )
    assert text_of_40 in text
    ((_, low, high),) = worse.values()
    assert low < 0 < high
    ((pair, (top1, _, _)),) = [
        each
        for each in differences(lines, AFTER_FIRST).items()
        if set(each[0]) == {order[0], balanced}
    ]
    sign = -100 if pair[0] == order[0] else 100
    low, high = sorted((sign * top1.low, sign * top1.high))
    assert f"matches {sign * top1.mean:.1f} points ({low:.1f} to {high:.1f}) less than" in text


def test_the_table_of_ordinary_requests_matches_the_raw_results():
    found = {
        (cell.question, cell.method, cell.budget): cell.along[AFTER_LOOKAHEAD]
        for cell in cells(read([RESULTS / "ordinary_qwen2.jsonl.xz"]))
        if cell.task == ORDINARY
    }
    _, _, *body = rows("measurements.md", "| `cake-chunk` at | Instruction first")
    assert len(body) > 4
    for setting, *figures in body:
        budget, _, without = setting.partition(" without ")
        for question, figure in zip(("first", "last"), figures, strict=True):
            method = WITHOUT_LOOKAHEAD if without else "cake-chunk"
            stats = found[question, method, float(budget.strip("*"))]
            assert stats.top1.prompts == {"first": 15, "last": 19}[question]
            assert figure == f"{percent(stats.top1, 0)}, {stats.kl.mean:.2f}", (setting, question)


def test_the_table_of_hidden_numbers_matches_the_raw_results():
    paths = [RESULTS / f"evidence_{name}.jsonl.xz" for name in ("smollm2", "qwen2")]
    found = {
        (cell.model, cell.method, cell.budget): cell.score
        for cell in cells(read(paths))
        if (cell.task, cell.question, cell.tokens) == ("niah-multikey-1", "last", 2200)
    }
    _, _, *body = rows("measurements.md", "| Method | SmolLM2-135M")
    assert len(body) > 4
    for name, *figures in body:
        method = WITHOUT_LOOKAHEAD if name == "cake-chunk" else name
        columns = [(DEMO, (0.5, 0.2, 0.1), 43), (SECOND, (0.2, 0.1), 20)]
        for (model, budgets, texts), figure in zip(columns, figures, strict=True):
            scores = [found[model, method, budget] for budget in budgets]
            assert figure == ", ".join(f"{score.mean * 100:.0f} %" for score in scores), name
            for score in scores:
                assert (score.prompts, score.independent) == (100, texts)
                # as the sentence behind the table says
                assert max(score.high - score.mean, score.mean - score.low) < 0.1001
