"""Alternating rounds, paired differences with their interval, and switches of the plugin."""

from collections import Counter
from itertools import pairwise
from math import comb

import pytest

from benchmarks.gpu import switches
from benchmarks.gpu.rounds import CONFIDENCE, alternate, difference, interval_rank, order


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcd"])
def test_each_variant_runs_equally_often_at_each_place(names):
    rounds = [order(names, number) for number in range(2 * len(names))]
    places = Counter((name, place) for found in rounds for place, name in enumerate(found))
    assert set(places.values()) == {2}
    neighbours = Counter(pair for found in rounds for pair in pairwise(found))
    assert all(neighbours[a, b] == neighbours[b, a] for a, b in neighbours)


def test_all_variants_run_in_a_round_and_the_warm_up_is_dropped():
    runs = []

    def variant(name):
        def run_round(number):
            runs.append((number, name))
            return {"step_ms": float(number)}

        return run_round

    found = alternate(2, {"a": variant("a"), "b": variant("b")})
    assert runs == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "b"), (2, "a")]
    assert found["a"] == found["b"] == [{"step_ms": 1.0}, {"step_ms": 2.0}]


@pytest.mark.parametrize(("count", "rank"), [(1, 1), (5, 1), (6, 1), (9, 2), (40, 14), (100, 40)])
def test_the_interval_of_the_median_matches_the_table_of_the_sign_test(count, rank):
    found, confidence = interval_rank(count)
    assert found == rank
    outside = sum(comb(count, k) for k in range(rank)) / 2**count
    assert confidence == pytest.approx(1 - 2 * outside)
    assert (confidence >= CONFIDENCE) == (count >= 6)


def test_drift_of_the_machine_cancels_in_paired_differences():
    """The machine's speed doubles over the rounds; the variant is 1 % slower in each."""
    speeds = [1 + number / 40 for number in range(40)]
    found = {
        "full": [{"ms": 5 * speed} for speed in speeds],
        "plugin": [{"ms": 5.05 * speed} for speed in speeds],
    }
    result = difference(found, "plugin", "full", "ms")
    assert (result.median, result.low, result.high) == pytest.approx((0.01, 0.01, 0.01))
    assert result.rounds == 40
    assert str(result) == "+1.00 to +1.00 % with 96% confidence, 40 rounds"


def test_the_interval_covers_outliers_but_does_not_reach_them():
    changes = [0.01] * 30 + [0.5] * 5 + [-0.5] * 5
    found = {"full": [{"ms": 1.0}] * 40, "plugin": [{"ms": 1 + change} for change in changes]}
    result = difference(found, "plugin", "full", "ms")
    assert (result.median, result.low, result.high) == pytest.approx((0.01, 0.01, 0.01))


def test_a_switch_is_restored(monkeypatch):
    from vllm_kvcompress.engine.worker import worker

    owner = worker.CompressingWorker
    changed = property(lambda self: True)
    monkeypatch.setattr(owner, "_a_change", changed, raising=False)
    target = (worker.__name__, owner.__name__, "_a_change", False)
    monkeypatch.setitem(switches.SWITCHES, "a change", target)
    for _ in range(2):
        assert switches.switch("a change", on=False)
        assert owner._a_change is False
        assert switches.switch("a change", on=False)
        assert switches.switch("a change", on=True)
        assert vars(owner)["_a_change"] is changed


def test_a_constant_of_a_module_can_be_a_switch(monkeypatch):
    from vllm_kvcompress.engine.worker import worker

    monkeypatch.setattr(worker, "A_CONSTANT", 8, raising=False)
    monkeypatch.setitem(switches.SWITCHES, "more", (worker.__name__, None, "A_CONSTANT", 1))
    assert switches.switch("more", on=False)
    assert worker.A_CONSTANT == 1
    assert switches.switch("more", on=True)
    assert worker.A_CONSTANT == 8


def test_a_switch_that_this_commit_lacks_is_reported(monkeypatch):
    from vllm_kvcompress.engine.worker import worker

    target = (worker.__name__, "CompressingWorker", "_does_not_exist", False)
    monkeypatch.setitem(switches.SWITCHES, "not here", target)
    assert not switches.switch("not here", on=False)
