"""Summaries of outcomes, and the recommended cell."""

import random

import pytest

from outcomes import outcome, places
from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.compare.measures import Divergence
from vllm_kvcompress.compare.summary import default_measure, recommend, summarise

SNAP, CAKE, LARGE = (
    Cell(method="snapkv", budget=0.2), Cell(method="cake", budget=0.2),
    Cell(method="snapkv", budget=0.5),
)  # fmt: skip


def outcomes_of(cell, num_wrong=0, count=200, **figures):
    """Return `count` outcomes, of which the first `num_wrong` lose the answer."""
    wrong_figures = dict(score=0.0, exact=False, shared=2, similarity=0.25)
    return [
        outcome(f"p{n}", cell, **{**figures, **(wrong_figures if n < num_wrong else {})})
        for n in range(count)
    ]


def summaries(*outcomes, by="score", cells=(SNAP, CAKE, LARGE), none_compressed=False):
    return summarise(cells, outcomes, by=by, none_compressed=none_compressed)


def test_summary_of_two_outcomes():
    first = outcome(
        "a", score=0.5, exact=False, shared=3, similarity=0.5, by_place=places(4, 3, 0.6),
        kept_tokens=30.0, first_token_s=0.7, token_s=None,
    )  # fmt: skip
    second = outcome("b", prompt_tokens=300, kept_tokens=50.0, token_s=0.04)
    (summary,) = summaries(first, second, cells=[SNAP])
    assert (summary.asked, summary.compressed, summary.kept) == (2, 2, 80 / 400)
    assert (summary.exact.mean, summary.similarity.mean, summary.diverged) == (0.5, 0.75, 3)
    assert (summary.places, summary.same_first.mean) == (11, 10 / 11)
    assert summary.kl.mean == pytest.approx(0.6 / 11)
    assert (summary.score.mean, summary.full_score.mean, summary.drop.mean) == (0.75, 1.0, 0.25)
    assert summary.times.first_token_s == pytest.approx(0.6)
    assert (summary.times.full_token_s, summary.times.token_s) == (0.03, 0.04)  # pairs only


def test_position_figures_are_means_over_tokens():
    early, late, empty = (Divergence(places=n, same_first=s, kl=k) for n, s, k in (
        (31, 30, 0.31), (2, 1, 0.5), (0, 0, 0.0)))  # fmt: skip
    long = outcome("a", by_place=(early, late, empty), length=20, full_length=40, loops=True)
    short = outcome("b", by_place=(late, empty, empty), full_loops=True)
    uncompressed = outcome("c", by_place=(early, early, early), kept_tokens=None)
    (summary,) = summaries(long, short, uncompressed, cells=[SNAP])
    assert set(summary.along) == {"1 to 32", "33 to 64"}
    first = summary.along["1 to 32"]
    assert (first.places, first.same_first.mean) == (33, 31 / 33)
    assert first.kl.mean == pytest.approx(0.81 / 33)
    assert summary.along["33 to 64"].kl.independent == 1
    assert (summary.length.mean, summary.loops, summary.full_loops) == (28 / 48, 0.5, 0.5)


def test_the_drop_is_paired_by_prompt():
    """A prompt that both sides get wrong is no loss, and one that only compression gets right is a
    gain."""
    unknown = [outcome(f"u{n}", score=0.0, full_score=0.0) for n in range(40)]
    won, kept = outcome("w", score=1.0, full_score=0.0), outcome("k", score=1.0, full_score=1.0)
    (summary,) = summaries(*unknown, won, kept, cells=[SNAP])
    assert summary.drop.mean == pytest.approx(-1 / 42)
    assert summary.drop.upper <= 0
    assert summary.loss.bound == pytest.approx(1 - 0.05 ** (1 / 42))
    (summary,) = summaries(*unknown, cells=[SNAP])
    assert (summary.drop.mean, summary.loss) == (0.0, None)


def test_uncompressed_prompts_are_in_no_figure():
    uncompressed = [outcome(f"w{n}", kept_tokens=None) for n in range(30)]
    wrong = outcome("c", score=0.0, exact=False, similarity=0.0)
    (summary,) = summaries(*uncompressed, wrong, cells=[SNAP])
    assert (summary.asked, summary.compressed) == (31, 1)
    assert (summary.exact.mean, summary.drop.mean, summary.loss.independent) == (0, 1, 1)


def test_figures_cover_all_prompts_if_compression_is_not_reported():
    unknown = [outcome(f"u{n}", kept_tokens=None) for n in range(200)]
    (summary,) = summaries(*unknown, cells=[SNAP])
    assert (summary.compressed, summary.kept, summary.exact.prompts) == (None, None, 200)
    assert recommend([summary], by="score", max_drop=0.02).cell == SNAP
    (uncompressed,) = summaries(*unknown, cells=[SNAP], none_compressed=True)
    assert (uncompressed.compressed, uncompressed.loss) == (0, None)
    recommendation = recommend([uncompressed], by="score", max_drop=0.02)
    assert recommendation.cell is None
    assert "no prompt is known to have been compressed" in recommendation.sentence


def test_recommends_the_smallest_budget_and_then_the_smallest_loss():
    almost, large = outcomes_of(SNAP, num_wrong=1), outcomes_of(LARGE)
    cell_summaries = summaries(*almost, *outcomes_of(CAKE), *large)
    assert recommend(cell_summaries, by="score", max_drop=0.02).cell == CAKE
    wrong = (each for cell in (SNAP, CAKE) for each in outcomes_of(cell, num_wrong=40))
    cell_summaries = summaries(*wrong, *large)
    best = recommend(cell_summaries, by="score", max_drop=0.02)
    assert best.cell == LARGE
    assert best.sentence.startswith("Run snapkv 0.5, which keeps 20.0% of the tokens: its loss")


def test_a_budget_in_k4v3_counts_a_quarter():
    packed = [Cell(method="cake", budget=n, packed_dtype="k4v3") for n in (0.6, 1.0)]
    for cells, best in (([CAKE, packed[0]], packed[0]), ([CAKE, packed[1]], CAKE)):
        found = summaries(*(o for cell in cells for o in outcomes_of(cell)), cells=cells)
        assert recommend(found, by="score", max_drop=0.02).cell == best


def test_the_order_of_outcomes_does_not_change_the_summary():
    """Intervals are equal to the last bit. A resumed run completes its prompts in another order."""

    def made(n):
        figures = {"score": n % 3 / 2, "exact": n % 3 == 2, "similarity": n / 40}
        return outcome(f"p{n}", by_place=places(7, kl=1 / (n + 1)), **figures)

    outcomes = [made(n) for n in range(40)]
    (expected,) = summaries(*outcomes, cells=[SNAP])
    random.Random(0).shuffle(outcomes)
    (summary,) = summaries(*outcomes, cells=[SNAP])
    assert summary == expected


def test_without_a_cell_within_max_drop_the_nearest_is_named():
    counts = {SNAP: 40, CAKE: 60, LARGE: 50}
    cell_summaries = summaries(*(o for cell, n in counts.items() for o in outcomes_of(cell, n)))
    recommendation = recommend(cell_summaries, by="score", max_drop=0.02)
    assert recommendation.cell is None
    assert "The nearest is snapkv 0.2, with a loss of at most" in recommendation.sentence


@pytest.mark.parametrize(("count", "enough"), [(148, False), (149, True)])
def test_with_too_few_prompts_the_needed_number_is_named(count, enough):
    found = summaries(*outcomes_of(SNAP, count=count))
    recommendation = recommend(found, by="score", max_drop=0.02)
    assert (recommendation.cell == SNAP) == enough
    assert ("At least 149 are needed." in recommendation.sentence) == (not enough)


def test_prompts_of_one_group_count_as_one_independent_prompt():
    grouped = [outcome(f"p{n}", group=f"text {n % 9}") for n in range(400)]
    recommendation = recommend(summaries(*grouped), by="score", max_drop=0.02)
    assert "9 independent prompts are too few to confirm a drop" in recommendation.sentence
    copies = [outcome("k" if n == 0 else f"k#{n + 1}") for n in range(400)]
    recommendation = recommend(summaries(*copies), by="score", max_drop=0.02)
    assert recommendation.sentence.startswith("No recommendation: 1 independent")


@pytest.mark.parametrize(("by", "loss"), [("agreement", 0.05), ("similarity", 0.0375)])
def test_loss_by_other_measures(by, loss):
    (summary,) = summaries(*outcomes_of(SNAP, num_wrong=10), by=by, cells=[SNAP])
    assert summary.loss.mean == pytest.approx(loss)


def test_the_default_measure_is_score_if_answers_are_known():
    assert default_measure([outcome(), outcome(score=None, full_score=None)]) == "score"
    assert default_measure([outcome(score=None, full_score=None)]) == "similarity"


def test_scores_by_task_need_several_tasks():
    outcomes = [outcome("a", task="x", score=0.5), outcome("b", task="y", score=0.25)]
    (summary,) = summaries(*outcomes, cells=[SNAP])
    assert summary.tasks == {"x": (0.5, 1.0), "y": (0.25, 1.0)}
    (single,) = summaries(outcomes[0], cells=[SNAP])
    assert single.tasks == {}
