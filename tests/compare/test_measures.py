"""Agreement, edit distance, KL and loops, compared with direct implementations."""

import functools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.compare.measures import (
    agreement,
    coarse_kl,
    distance,
    divergence,
    loops,
    similarity,
)

TEXT = st.text("abc", max_size=12)


def levenshtein(a: str, b: str) -> int:
    @functools.cache
    def of(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        same = a[i - 1] == b[j - 1]
        return min(of(i - 1, j) + 1, of(i, j - 1) + 1, of(i - 1, j - 1) + (not same))

    return of(len(a), len(b))


@given(TEXT, TEXT)
def test_distance_is_the_levenshtein_distance(a, b):
    assert distance(a, b) == levenshtein(a, b) == distance(b, a)


@given(TEXT, TEXT)
def test_similarity_is_one_for_equal_texts_only(a, b):
    assert 0 <= similarity(a, b) <= 1
    assert (similarity(a, b) == 1) == (a == b)


@pytest.mark.parametrize(
    ("a", "b", "exact", "shared", "similar"),
    [
        ("", "", True, 0, 1.0),
        ("", "ab", False, 0, 0.0),
        ("abcd", "abxd", False, 2, 0.75),
        ("abcd", "ab", False, 2, 0.5),
        ("kitten", "sitting", False, 0, 1 - 3 / 7),
    ],
)
def test_agreement(a, b, exact, shared, similar):
    result = agreement(list(a), list(b))
    assert (result.exact, result.shared) == (exact, shared)
    assert result.similarity == pytest.approx(similar)


def distributions(size: int):
    weights = st.lists(st.floats(1e-6, 1.0), min_size=size, max_size=size)
    return weights.map(lambda w: [x / math.fsum(w) for x in w])


def top(p: list[float], count: int) -> dict[str, float]:
    order = sorted(range(len(p)), key=lambda t: -p[t])[:count]
    return {str(t): math.log(p[t]) for t in order}


@given(distributions(9), distributions(9), st.integers(1, 9))
def test_coarse_kl_is_a_lower_bound_and_exact_with_all_tokens(p, q, count):
    true = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    result = coarse_kl(top(p, count), top(q, count))
    assert 0 <= result <= true + 1e-4
    assert coarse_kl(top(p, 9), top(q, 9)) == pytest.approx(max(true, 0), abs=1e-4)
    assert coarse_kl(top(p, count), top(p, count)) == pytest.approx(0, abs=1e-9)


def test_coarse_kl_merges_tokens_of_one_side():
    """Only a is on both sides, so b and c are merged: (0.5, 0.5) against (0.25, 0.75)."""
    p = {"a": math.log(0.5), "b": math.log(0.4)}
    q = {"a": math.log(0.25), "c": math.log(0.7)}
    want = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert coarse_kl(p, q) == pytest.approx(want)


def test_coarse_kl_of_near_certain_tokens_is_finite():
    """The probabilities of float32 log-probabilities can sum to slightly more than 1."""
    assert coarse_kl({"a": 1e-8}, {"a": -30.0, "b": 0.0}) == pytest.approx(30.0)
    assert coarse_kl({"a": -30.0, "b": 0.0}, {"a": 1e-8}) < 20
    assert coarse_kl({"a": 1e-7}, {"a": 1e-7}) == 0


def test_divergence_sums_over_positions():
    confident, uncertain = (
        {"a": math.log(0.9), "b": math.log(0.1)},
        {"a": math.log(0.4), "b": math.log(0.6)},
    )
    result = divergence([confident, confident], [confident, uncertain])
    assert (result.places, result.same_first) == (2, 1)
    assert result.kl == pytest.approx(coarse_kl(confident, uncertain))
    with pytest.raises(ValueError, match="shorter"):
        divergence([confident], [])


@pytest.mark.parametrize(
    ("text", "ends_in_a_loop"),
    [
        ("It is so. It is so. It is so. It is so.", True),
        ("First this. It is so. It is so. It is so. It is so. It is", True),
        ("no no no no", True),
        ("no no no noth", False),
        ("no no no no noth", True),
        ("It is so. It is so. It is so.", False),
        ("no no no no, and then it ends", False),
        ("a b c d a b c d a b c d a b c d", True),
        ("", False),
    ],
)
def test_four_repetitions_at_the_end_are_a_loop(text, ends_in_a_loop):
    assert loops(text) is ends_in_a_loop


def test_a_passage_of_eight_words_three_times_is_a_loop():
    passage = "the cat sat on the mat and slept"
    assert loops(f"{passage} soundly. {passage} again, and {passage} at last, and then it woke up")
    assert not loops(f"{passage} soundly. {passage} again, and then the cat woke up")
    seven_words = passage.rsplit(" ", 1)[0]
    assert not loops(
        f"{seven_words} so. {seven_words} here. {seven_words} there, and then the cat woke up"
    )
    # Occurrences must not overlap: five repetitions of four words contain the passage twice.
    assert not loops("a b c d " * 5 + "x y")
    assert loops("a b c d " * 6 + "x y")
