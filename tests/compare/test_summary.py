"""From outcomes to figures, and which cell may be run."""

import random

import pytest

from outcomes import outcome
from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.compare.measures import Divergence
from vllm_kvcompress.compare.summary import default_by, recommend, summarise

SNAP, CAKE, LARGE = (
    Cell(method="snapkv", budget=0.2), Cell(method="cake", budget=0.2),
    Cell(method="snapkv", budget=0.5),
)  # fmt: skip


def cell_of(cell, wrong=0, count=200, **figures):
    """`count` outcomes, of which the first `wrong` lose their answer."""
    bad = dict(score=0.0, exact=False, shared=2, similarity=0.25)
    return [
        outcome(f"p{n}", cell, **{**figures, **(bad if n < wrong else {})}) for n in range(count)
    ]


def summaries(*outcomes, by="score", cells=(SNAP, CAKE, LARGE), none_compressed=False):
    return summarise(cells, outcomes, by=by, none_compressed=none_compressed)


def test_figures_by_hand():
    one = outcome("a", score=0.5, exact=False, shared=3, similarity=0.5, places=4, same_first=3,
                  kl=0.6, kept_tokens=30.0, first_token_s=0.7, token_s=None)  # fmt: skip
    two = outcome("b", prompt_tokens=300, kept_tokens=50.0, token_s=0.04)
    (found,) = summaries(one, two, cells=[SNAP])
    assert (found.asked, found.compressed, found.kept) == (2, 2, 80 / 400)
    assert (found.exact.mean, found.similarity.mean, found.diverged) == (0.5, 0.75, 3)
    assert (found.places, found.same_first.mean) == (11, 10 / 11)
    assert found.kl.mean == pytest.approx(0.6 / 11)
    assert (found.score.mean, found.full_score.mean, found.drop.mean) == (0.75, 1.0, 0.25)
    assert found.times.first_token_s == pytest.approx(0.6)
    assert (found.times.full_token_s, found.times.token_s) == (0.03, 0.04)  # of pairs alone


def test_what_is_lost_along_answers_is_weighed_by_their_tokens():
    early, late, none = (Divergence(places=n, same_first=s, kl=k) for n, s, k in (
        (31, 30, 0.31), (2, 1, 0.5), (0, 0, 0.0)))  # fmt: skip
    long = outcome("a", by_place=(early, late, none), length=20, full_length=40, loops=True)
    short = outcome("b", by_place=(late, none, none), full_loops=True)
    whole = outcome("c", by_place=(early, early, early), kept_tokens=None)
    (found,) = summaries(long, short, whole, cells=[SNAP])
    assert set(found.along) == {"1 to 32", "33 to 64"}
    first = found.along["1 to 32"]
    assert (first.places, first.same_first.mean) == (33, 31 / 33)
    assert first.kl.mean == pytest.approx(0.81 / 33)
    assert found.along["33 to 64"].kl.independent == 1
    assert (found.length.mean, found.loops, found.full_loops) == (28 / 48, 0.5, 0.5)


def test_the_drop_is_paired():
    """What the full cache does not know either is no loss, and what it got wrong may be won."""
    unknown = [outcome(f"u{n}", score=0.0, full_score=0.0) for n in range(40)]
    won = outcome("w", score=1.0, full_score=0.0)
    (found,) = summaries(*unknown, won, cells=[SNAP])
    assert found.drop.mean == pytest.approx(-1 / 41)
    assert found.drop.upper <= 0
    assert found.bound == pytest.approx(1 - 0.05 ** (1 / 41))


def test_prompts_left_whole_are_in_no_figure():
    whole = [outcome(f"w{n}", kept_tokens=None) for n in range(30)]
    wrong = outcome("c", score=0.0, exact=False, similarity=0.0)
    (found,) = summaries(*whole, wrong, cells=[SNAP])
    assert (found.asked, found.compressed) == (31, 1)
    assert (found.exact.mean, found.drop.mean, found.loss.independent) == (0, 1, 1)


def test_where_nobody_knows_what_was_compressed_nothing_is_guessed():
    unknown = [outcome(f"u{n}", kept_tokens=None) for n in range(200)]
    (found,) = summaries(*unknown, cells=[SNAP])
    assert (found.compressed, found.kept, found.exact.prompts) == (None, None, 200)
    assert recommend([found], by="score", max_drop=0.02).cell == SNAP
    (none,) = summaries(*unknown, cells=[SNAP], none_compressed=True)
    assert (none.compressed, none.loss) == (0, None)
    nothing = recommend([none], by="score", max_drop=0.02)
    assert nothing.cell is None
    assert "nothing that was asked is known to have been compressed" in nothing.sentence


def test_the_smallest_budget_within_and_of_two_the_better():
    found = summaries(
        *cell_of(SNAP, wrong=1), *cell_of(CAKE), *cell_of(LARGE), cells=[SNAP, CAKE, LARGE]
    )
    assert recommend(found, by="score", max_drop=0.02).cell == CAKE
    found = summaries(*cell_of(SNAP, wrong=40), *cell_of(CAKE, wrong=40), *cell_of(LARGE))
    best = recommend(found, by="score", max_drop=0.02)
    assert best.cell == LARGE
    assert best.sentence.startswith("Run snapkv 0.5, which keeps 20.0% of the tokens: its loss")


def test_the_order_of_answers_does_not_matter():
    """Not to the last bit of an interval: an interrupted run has other prompts in flight."""
    answers = [
        outcome(f"p{n}", score=n % 3 / 2, exact=n % 3 == 2, similarity=n / 40, kl=1 / (n + 1))
        for n in range(40)
    ]
    (want,) = summaries(*answers, cells=[SNAP])
    random.Random(0).shuffle(answers)
    (found,) = summaries(*answers, cells=[SNAP])
    assert found == want


def test_none_within():
    found = summaries(*cell_of(SNAP, wrong=40), *cell_of(CAKE, wrong=60), *cell_of(LARGE, wrong=50))
    none = recommend(found, by="score", max_drop=0.02)
    assert none.cell is None
    assert "The nearest is snapkv 0.2: at most" in none.sentence


@pytest.mark.parametrize(("count", "enough"), [(148, False), (149, True)])
def test_too_few_prompts_say_how_many_it_takes(count, enough):
    none = recommend(summaries(*cell_of(SNAP, count=count)), by="score", max_drop=0.02)
    assert (none.cell == SNAP) == enough
    assert ("It takes 149." in none.sentence) == (not enough)


def test_many_questions_about_few_texts_are_too_few():
    grouped = [outcome(f"p{n}", group=f"text {n % 9}") for n in range(400)]
    none = recommend(summaries(*grouped), by="score", max_drop=0.02)
    assert "9 independent prompts can show no drop" in none.sentence
    copies = [outcome("k" if n == 0 else f"k#{n + 1}") for n in range(400)]
    none = recommend(summaries(*copies), by="score", max_drop=0.02)
    assert none.sentence.startswith("No recommendation: 1 independent")


@pytest.mark.parametrize(("by", "loss"), [("agreement", 0.05), ("similarity", 0.0375)])
def test_other_measures(by, loss):
    (found,) = summaries(*cell_of(SNAP, wrong=10), by=by, cells=[SNAP])
    assert found.loss.mean == pytest.approx(loss)


def test_what_is_measured_by_itself():
    assert default_by([outcome(), outcome(score=None, full_score=None)]) == "score"
    assert default_by([outcome(score=None, full_score=None)]) == "similarity"


def test_tasks_apart():
    outcomes = [outcome("a", task="x", score=0.5), outcome("b", task="y", score=0.25)]
    (found,) = summaries(*outcomes, cells=[SNAP])
    assert found.tasks == {"x": (0.5, 1.0), "y": (0.25, 1.0)}
    (single,) = summaries(outcomes[0], cells=[SNAP])
    assert single.tasks == {}
