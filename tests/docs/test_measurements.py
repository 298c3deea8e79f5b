"""The tables of cache formats and of the field's tasks match the raw results."""

from pathlib import Path

import pytest

from benchmarks.evidence.cache_formats import CACHE_FORMATS
from benchmarks.evidence.cells import AFTER_LOOKAHEAD, ORDINARY, cells, read
from benchmarks.evidence.field_report import summary_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
EVICTING = {"16 bits": "cake-chunk", "k4v3": "cake-chunk, k4v3", "fp8": "cake-chunk, fp8"}
DEMO, SECOND = "smollm2-135m-instruct", "qwen2.5-coder-0.5b"
COLUMNS = {
    "Instruction first: match, KL": (SECOND, "first"),
    "Instruction last: match, KL": (SECOND, "last"),
    "Demo's model, first": (DEMO, "first"),
    "Demo's model, last": (DEMO, "last"),
}


@pytest.fixture(scope="module")
def measured():
    """Return the cells over all ordinary requests by model, question, method and budget."""
    found = cells(read([RESULTS / f"formats_{name}.jsonl.xz" for name in ("smollm2", "qwen2")]))
    return {
        (cell.model, cell.question, cell.method, cell.budget): cell
        for cell in found
        if cell.task == ORDINARY
    }


def rows(page, start_of_header):
    """Return the rows of a table, the header first."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(start_of_header))
    table = lines[start : lines.index("", start)]
    return [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_the_fields_tasks_matches_the_raw_results():
    found = cells(read([RESULTS / f"field_{name}.jsonl.xz" for name in ("smollm2", "qwen2")]))
    assert summary_table(found) in (ROOT / "docs" / "measurements.md").read_text()


@pytest.mark.parametrize("page", ["measurements.md", "measurements-appendix.md"])
def test_the_table_of_cache_formats_matches_the_raw_results(page, measured):
    header, _, *body = rows(page, "| Cache | Tokens kept")
    assert len(body) > 6
    for name, kept, share, *figures in body:
        budget = int(kept.removesuffix(" %")) / 100
        alone = budget == 1.0 and name in CACHE_FORMATS
        method = name if alone else EVICTING[name]
        for title, figure in zip(header[3:], figures, strict=True):
            key = (*COLUMNS[title], method, budget)
            if not figure:
                assert key not in measured
                continue
            cell = measured[key]
            stats = cell.along[AFTER_LOOKAHEAD]
            assert figure == f"{stats.top1.mean * 100:.1f} %, {stats.kl.mean:.3f}", key
            low, high = (float(share.split(" to ")[end]) for end in (0, -1))
            assert low - 0.006 < cell.bytes < high + 0.006, key


def test_the_table_of_numbers_found_matches_the_raw_results():
    paths = [RESULTS / f"formats_tasks_{name}.jsonl.xz" for name in ("smollm2", "qwen2")]
    measured = {
        (cell.model, cell.question, cell.method, cell.budget): cell
        for cell in cells(read(paths))
        if cell.task == "niah-multikey-1"
    }
    header, _, *body = rows("measurements-appendix.md", "| Numbers found with")
    assert len(body) > 4
    for name, kept, *figures in body:
        for title, figure in zip(header[2:], figures, strict=True):
            prompts, model = title.split(": ")
            method = EVICTING[name]
            if prompts != "Late":
                method = method.replace("cake-chunk", "cake-chunk, lookahead 0")
            key = (
                {"demo's model": DEMO, "second model": SECOND}[model],
                "last" if prompts == "Hidden" else "late",
                method,
                int(kept.removesuffix(" %")) / 100,
            )
            if not figure:
                assert key not in measured
                continue
            score = measured[key].score
            found = round(score.mean * score.prompts)
            assert figure == f"{found} of {score.prompts}", key
