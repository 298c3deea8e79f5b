"""Protected spans are kept in every layer and head, and the method chooses the rest."""

import pytest
import torch

from against_the_reference import SHAPES, WINDOWS, assert_equals_reference, inputs
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.offline import compress

SPANS = {
    "at the start": [[0, 9]],
    "separate": [[3, 5], [20, 23], [5, 7]],
    "into the window": [[11, 14], [62, 80]],
}


@pytest.mark.parametrize("spans", list(SPANS.values()), ids=list(SPANS))
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "random"])
def test_equals_the_reference_with_protected_spans(preset, spans):
    assert_equals_reference(preset, "gqa", 0.5, spans=spans)


@pytest.mark.parametrize("preset", ["cake", "cake-chunk", "tova", "pyramidkv"])
def test_equals_the_reference_if_output_tokens_score(preset):
    assert_equals_reference(preset, "smol", 0.5, lookahead=24, spans=[[1, 4], [30, 37]])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("preset", ["snapkv", "cake", "d2o", "dynamickv", "chunkkv"])
def test_a_budget_too_small_for_protected_tokens_is_raised(preset, page_size):
    q, k, v = inputs(2, 4, 2, 400, 8, 0.0, seed=2)
    span = [10, 110]
    got = compress(q, k, v, policy=preset, budget=0.1, page_size=page_size, protect=[span])
    w = WINDOWS.get(preset, 32)
    # the window and a page, or half of a budget of 40 tokens
    min_tokens = max(-(-(100 + w) // page_size) + 1, -(-120 // page_size)) * page_size
    assert sum(got.budgets) == 2 * min_tokens
    for kept in got.positions:
        assert all(set(range(*span)) <= set(row) for row in kept.tolist())


def test_other_tokens_keep_half_of_the_budget():
    """0.4 of 400 tokens keeps 160, and with 120 protected tokens half of that in addition."""
    q, k, v = inputs(2, 4, 2, 400, 8, 0.0, seed=2)
    spans, budgets = ([[10, 60]], [[10, 130]]), []
    for page_size in (1, 16):
        for protect in spans:
            got = compress(q, k, v, policy="cake", budget=0.4, page_size=page_size, protect=protect)
            budgets.append(sum(got.budgets))
    assert budgets == [2 * 160, 2 * (120 + 80), 2 * 160, 2 * 208]


def test_a_mostly_protected_prompt_stays_uncompressed():
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    half = compress(q, k, v, policy="snapkv", budget=0.4, protect=[[0, 50]])
    assert half.budgets == [83] * 6  # the window's 32, the 50 protected, and one more
    uncompressed = compress(q, k, v, policy="snapkv", budget=0.4, protect=[[0, 51]])
    assert uncompressed.budgets == [101] * 6


def test_protecting_only_window_tokens_changes_nothing():
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    one, other = (
        compress(q, k, v, policy="cake-chunk", budget=0.5, page_size=4, protect=spans)
        for spans in ((), [[85, 101]])  # the window
    )
    assert one.budgets == other.budgets
    for a, b in zip(one.positions, other.positions, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("protect", "message"),
    [
        ([[0, 102]], r"within the prompt's 101 tokens, got \[0, 102\]"),
        ([[5, 5]], "must begin before it ends"),
        ([[9, 12], [0, 10]], r"must not overlap, got \[0, 10\] and \[9, 12\]"),
        ([3], "must be a pair of whole numbers"),
        ([[0, 2.5]], "must be a pair of whole numbers"),
        ([[0, True]], "must be a pair of whole numbers"),
    ],
)
def test_bad_spans_are_refused(protect, message):
    q, k, v = inputs(*SHAPES["gqa"], seed=1)
    with pytest.raises(ConfigError, match=message):
        compress(q, k, v, policy="cake", budget=0.5, protect=protect)
