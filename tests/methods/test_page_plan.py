"""Page plans: the pages and blocks that a compressed prompt keeps, from lengths alone."""

import pickle
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.methods.budget_spec import BudgetSpec
from vllm_kvcompress.methods.page_plan import (
    RECENT_TOKENS,
    PagePlan,
    leading_tokens,
    page_plan,
    pages_kept,
)
from vllm_kvcompress.methods.spans import count_before, token_count

prop = settings(derandomize=True, deadline=None, max_examples=120)


def budget_spec(layers, tokens, window, budget):
    return BudgetSpec(num_layers=layers, tokens=tokens, window=window, budget=budget)


@st.composite
def cases(draw):
    block = draw(st.sampled_from([1, 2, 8, 16, 32, 64, 128]))
    window = draw(st.integers(0, 4 * block))
    budget = draw(st.integers(window + 1, window + 20 * block))
    tokens = draw(st.integers(1, 40 * block))
    return budget_spec(draw(st.integers(1, 80)), tokens, window, budget), block


def test_budget_spec():
    p = budget_spec(30, 6000, 32, 600)
    assert (p.past, p.base) == (5968, 568)
    assert budget_spec(30, 20, 32, 33).past == 0


def test_draft_layers_keep_every_token_in_the_same_blocks():
    """With 32 layers at 0.2 and one draft layer, a share of (32 * 0.2 + 1) / 33 is held."""
    tokens, block = 3200, 32
    budget = budget_spec(32, tokens, 32, tokens // 5)
    plan, with_drafts = page_plan(budget, block), page_plan(budget, block, draft_layers=1)
    assert with_drafts.pages == plan.pages == 32 * 20
    assert (plan.draft_pages, with_drafts.draft_pages) == (0, 100)
    assert (plan.blocks, with_drafts.blocks) == (20, ceil((640 + 100) / 33))
    assert round((640 + 100) / (33 * 100), 3) == 0.224


@pytest.mark.parametrize(
    ("layers", "tokens", "block", "window", "budget", "pages", "blocks", "floor_pages", "tail"),
    [
        # 30 * (600 - 0) // 16 = 1125; ceil(1125 / 30) = 38 blocks; window 32 -> 2 pages
        (30, 6000, 16, 32, 600, 1140, 38, 2, 0),
        # tail 8: 30 * 592 // 16 = 1110 = 37 blocks; ceil((32 - 8) / 16) = 2
        (30, 6008, 16, 32, 600, 1110, 37, 2, 8),
        # 3 * (21 - 4) // 16 = 3 (3.19); the window 8 needs ceil(4 / 16) = 1
        (3, 100, 16, 8, 21, 3, 1, 1, 4),
        # the tail alone exceeds the budget and contains the window; one page is kept
        (4, 47, 16, 8, 9, 4, 1, 1, 15),
        # 30 * 101 // 128 = 23 pages: the other 7 pages of their block are filled
        (30, 1025, 128, 1, 102, 30, 1, 1, 1),
        (30, 1025, 128, 0, 102, 30, 1, 1, 1),
        # pages of one token are exact
        (3, 100, 1, 0, 21, 63, 21, 1, 0),
        # a layer with only the token of the tail would produce nonsense: every layer keeps a page
        (3, 321, 32, 0, 1, 3, 1, 1, 1),
    ],
)
def test_worked_examples(layers, tokens, block, window, budget, pages, blocks, floor_pages, tail):
    plan = page_plan(budget_spec(layers, tokens, window, budget), block)
    found = plan.pages, plan.blocks, plan.floor_pages, plan.tail
    assert found == (pages, blocks, floor_pages, tail)


def test_no_plan_if_the_window_needs_every_page():
    assert page_plan(budget_spec(4, 130, 8, 9), 128) is None


@prop
@given(cases())
def test_formulas(case):
    """docs/methods.md 1.8 in rationals: every layer keeps a page, and every block is filled."""
    p, block = case
    layers, full_blocks = p.num_layers, p.tokens // block
    tail = p.tokens - full_blocks * block
    lowest = max(ceil(Fraction(p.window - tail, block)), 1)
    budget_pages = floor(Fraction(layers * (p.budget - tail), block))
    pages = max(budget_pages, layers * lowest)
    if block > 1:
        pages = layers * ceil(Fraction(pages, layers))
    pages = min(pages, layers * full_blocks)
    plan = page_plan(p, block)
    if p.tokens <= p.budget or full_blocks == 0 or pages == layers * full_blocks:
        assert plan is None
        return
    assert plan.pages == pages
    assert plan.floor_pages == lowest
    assert (plan.full_blocks, plan.tail) == (full_blocks, tail)
    assert plan.blocks == ceil(Fraction(max(budget_pages, layers * lowest), layers))
    filled = replace(p, budget=pages // layers * block + tail)
    assert plan.budget_spec == (p if block == 1 else filled)
    assert plan.block_size == block


@pytest.mark.parametrize(
    ("layers", "tokens", "blocks", "kept"),
    [(2, 640, 2, 256), (2, 641, 1, 129), (30, 641, 2, 257), (30, 1414, 3, 390)],
)
def test_kept_tokens_of_long_blocks(layers, tokens, blocks, kept):
    """The last is in docs/operate.md. A budget is undercut if it would need another block."""
    budget = 192 if tokens < 1000 else 282
    plan = page_plan(budget_spec(layers, tokens, 32, budget), 128)
    assert (plan.blocks, plan.layer_tokens(plan.blocks)) == (blocks, kept)


def test_plans_are_frozen_and_hashable():
    plan = page_plan(budget_spec(3, 100, 8, 21), 16)
    same = PagePlan(num_layers=3, tokens=100, block_size=16, window=8, budget=21, pages=3)
    assert plan == same
    assert hash(plan) == hash(same)
    assert pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(FrozenInstanceError):
        plan.pages = 4


@pytest.mark.parametrize(
    ("layers", "tokens", "block", "page_tokens", "budget", "pages", "blocks", "layer_tokens"),
    [
        # the first block and the last 2 stay: 30 * (600 - 48) // 64 = 258 pages = 9 blocks, of 375
        (30, 6000, 16, 64, 600, 270, 9, 16 + 576 + 32),
        # every token: 372 blocks of 16 tokens are 5,952 tokens, 93 pages of 64
        (30, 6000, 16, 64, 6000, 2790, 93, 6000),
        # tail 40, and a budget above the prompt
        (30, 6008, 16, 64, 9999, 2790, 93, 6008),
        # blocks of 128: 10 full blocks behind the first, 1,280 tokens, 3 pages of 512
        (30, 1500, 128, 512, 1500, 90, 3, 1500),
        # the first block would be more than a quarter of the 268 tokens before the window:
        # 30 * (300 - 92) // 512 = 12, filled to one block: 512 tokens and the tail
        (30, 1500, 128, 512, 300, 30, 1, 604),
        # 4 * 128 = 544 - 32: it is a quarter, and 30 * (544 - 128 - 92) // 512 = 18
        (30, 1500, 128, 512, 544, 30, 1, 128 + 604),
        (30, 1500, 128, 512, 543, 30, 1, 604),
    ],
)
def test_packed_pages_hold_more_tokens(
    layers, tokens, block, page_tokens, budget, pages, blocks, layer_tokens
):
    plan = page_plan(budget_spec(layers, tokens, 32, budget), block, page_tokens=page_tokens)
    assert (plan.pages, plan.blocks) == (pages, blocks)
    assert plan.layer_tokens(pages // layers) == layer_tokens
    assert plan.page_tokens == page_tokens


@prop
@given(cases(), st.sampled_from([2, 4, 8]))
def test_bounds_of_packed_pages(case, factor):
    """At the budget of all tokens nothing is dropped, and blocks become free if any can."""
    p, block = case
    page_tokens, full = block * factor, max(p.tokens - RECENT_TOKENS, 0) // block
    tail = p.tokens - full * block
    for budget in (p.budget, p.tokens, p.tokens + 5):
        spec = budget_spec(p.num_layers, p.tokens, p.window, budget)
        leading = block if 4 * block <= min(budget, p.tokens) - p.window else 0
        assert leading_tokens(spec, block, page_tokens) == leading
        plan = page_plan(spec, block, page_tokens=page_tokens)
        all_pages = ceil(Fraction(full * block - leading, page_tokens))
        if plan is None:
            pages = pages_kept(spec, tail, page_tokens, leading)
            blocks = full - leading // block
            assert full < 2 or p.tokens <= p.window or pages >= p.num_layers * blocks
            continue
        assert (plan.leading_tokens, plan.tail) == (leading, tail)
        assert plan.blocks + plan.leading_blocks < full
        assert p.num_layers * plan.floor_pages <= plan.pages <= p.num_layers * all_pages
        assert plan.max_layer_pages <= plan.full_pages == all_pages
        assert plan.budget_spec.budget <= p.tokens
        kept_tokens = p.num_layers * plan.layer_tokens(plan.blocks)
        assert kept_tokens > p.num_layers * min(budget, p.tokens) - page_tokens
        if budget >= p.tokens:
            assert plan.pages == p.num_layers * all_pages
            assert plan.layer_tokens(all_pages) == p.tokens


@st.composite
def protected_cases(draw):
    """Draw a case with spans of up to half of its tokens."""
    p, block = draw(cases())
    edges = sorted(draw(st.sets(st.integers(0, p.tokens), max_size=6)))
    return p, block, tuple(zip(edges[::2], edges[1::2], strict=False))


@prop
@given(protected_cases(), st.sampled_from([4, 8]), st.booleans())
def test_every_token_is_leading_packed_or_in_the_tail(case, factor, full_share):
    """Once each, and all that is always kept has a place. Blocks held and freed add up."""
    p, block, spans = case
    for cell in (None, block * factor):
        options = {"full_share": full_share, "page_tokens": block * factor, "cell": cell}
        plan = page_plan(p, block, spans, **options)
        if plan is None:
            continue
        assert plan.leading_tokens + plan.max_tokens_in_pages + plan.tail == plan.tokens
        assert plan.leading_tokens in (0, block)
        assert plan.held_blocks + plan.freed_blocks == -(-plan.tokens // block)
        assert plan.freed_blocks > 0 or plan.cell
        if plan.cell is not None:
            continue
        # leading tokens and the window do not overlap
        assert not plan.leading_tokens or plan.leading_tokens + plan.window <= plan.tokens
        end = plan.tokens - max(plan.window, plan.tail)
        always_kept = {*range(plan.leading_tokens), *range(end, plan.tokens)}
        always_kept |= {token for span in spans for token in range(*span)}
        assert set(range(p.tokens)) >= always_kept
        assert plan.layer_tokens(plan.floor_pages) >= len(always_kept) or plan.keeps_all
        assert plan.budget_spec.always_kept <= plan.budget_spec.budget
        in_pages = {token for token in always_kept if plan.leading_tokens <= token < end}
        assert plan.protected_in_pages == len(in_pages)
        in_spans = {token for span in spans for token in range(*span)}
        assert token_count(plan.always_kept_spans) == len(in_spans | {*range(plan.leading_tokens)})


@prop
@given(protected_cases(), st.sampled_from([4, 8]))
def test_a_raised_budget_leaves_other_tokens_their_share(case, factor):
    """With leading tokens too, which are not protected, but kept."""
    p, block, spans = case
    plan = page_plan(p, block, spans, page_tokens=block * factor)
    if plan is None or plan.keeps_all or not plan.protected_in_pages:
        return
    protected = count_before(spans, plan.tokens - plan.kept_after)
    assert plan.layer_tokens(plan.blocks) >= protected + ceil(Fraction(p.budget, 2))
    assert plan.pages >= p.num_layers * (plan.floor_pages + 1)
    if plan.raised:
        fewer = replace(plan, pages=plan.pages - p.num_layers)
        too_short = fewer.layer_tokens(fewer.blocks) < protected + ceil(Fraction(p.budget, 2))
        assert too_short or fewer.pages < p.num_layers * (plan.floor_pages + 1)
