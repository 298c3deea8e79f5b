"""Pages per layer and kept positions of one prompt."""

from dataclasses import replace

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm_kvcompress.methods import method
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.kept_slots import kept_in_pages, kept_slots, prepend_leading
from vllm_kvcompress.methods.page_plan import PagePlan, page_plan
from vllm_kvcompress.methods.parts.allocators import Uniform
from vllm_kvcompress.methods.parts.topk import TopK
from vllm_kvcompress.methods.protected import ProtectedTokens
from vllm_kvcompress.methods.published.cake import Cake
from vllm_kvcompress.methods.published.pyramidkv import Pyramid

prop = settings(derandomize=True, deadline=None, max_examples=60)


def layer_pages(allocator, plan, stats):
    return method.layer_pages(allocator, plan, stats).tolist()


def kept_positions(scores, plan, pages, selector):
    """Return the positions that one layer keeps, without the tail."""
    in_pages = kept_in_pages(plan, torch.tensor([pages], dtype=torch.int32))
    sizes = {"window": plan.window, "tail": plan.tail, "leading": plan.leading_tokens}
    sizes["width"] = int(in_pages)
    kept = kept_slots(scores[None], plan.tokens, in_pages, **sizes, selector=selector)
    assert kept.dtype == torch.int32
    assert ((kept >= plan.leading_tokens) | (kept < 0)).all()
    return prepend_leading(kept, plan.leading_tokens)[0].long()


def plan_of(layers, tokens, block, window, budget, page_tokens=None):
    p = BudgetSpec(num_layers=layers, tokens=tokens, window=window, budget=budget)
    return page_plan(p, block, page_tokens=page_tokens)


@st.composite
def plans(draw):
    """Draw plans with windows shorter and longer than the tail, and than a block."""
    block = draw(st.sampled_from([1, 4, 8, 16]))
    window = draw(st.integers(0, 3 * block))
    tokens = draw(st.integers(window + 1, window + 20 * block))
    budget = draw(st.integers(window + 1, tokens))
    page_tokens = draw(st.sampled_from([None, 2 * block, 4 * block])) if block > 1 else None
    plan = plan_of(draw(st.integers(1, 8)), tokens, block, window, budget, page_tokens)
    assume(plan is not None)
    return plan


@st.composite
def plans_with_stats(draw):
    plan = draw(plans())
    value = st.floats(1e-6, 1e3) | st.just(0.0)
    statistics = st.lists(value, min_size=plan.num_layers, max_size=plan.num_layers)
    entropy, shift = (torch.tensor(draw(statistics), dtype=torch.float64) for _ in range(2))
    return plan, LayerStats(entropy=entropy, shift=shift)


# -- pages per layer --------------------------------------------------------------------------


@prop
@given(plans_with_stats())
def test_layer_pages_keep_sum_and_bounds(case):
    plan, stats = case
    for allocator in (Uniform(), Pyramid(), Cake(), Cake(tau1=1.6, tau2=0.4)):
        pages = layer_pages(allocator, plan, stats)
        assert len(pages) == plan.num_layers
        assert sum(pages) == plan.pages
        assert all(plan.floor_pages <= p <= plan.full_pages for p in pages)


@prop
@given(plans())
def test_uniform_pages_differ_by_at_most_one(plan):
    pages = layer_pages(Uniform(), plan, None)
    low, more = divmod(plan.pages, plan.num_layers)
    assert pages == [low + (i < more) for i in range(plan.num_layers)]


def test_layer_pages_worked_example():
    # S 100, bs 16, w 4, B 36, N 4 -> (62, 42, 22, 2) + 4; t 4; pages 62/16, 42/16, 22/16, 2/16
    # P = 4 * 32 / 16 = 8; at least a page each: 3, 2, 1, 1; fractions .875, .625, .375, 0
    plan = plan_of(4, 100, 16, 4, 36)
    assert (plan.pages, plan.floor_pages) == (8, 1)
    assert layer_pages(Pyramid(), plan, None) == [4, 2, 1, 1]
    # 27 tokens need 5 pages, whose two blocks have 8 pages, as many as 36 tokens need
    assert layer_pages(Pyramid(), plan_of(4, 100, 16, 4, 27), None) == [4, 2, 1, 1]


# -- positions --------------------------------------------------------------------------------


def slow_positions(row, plan, pages):
    """Return the kept positions of one head by docs/methods.md 1.6 and 1.8, with loops."""
    end = plan.full_blocks * plan.block_size
    past = plan.tokens - plan.window
    protected = [j for j in range(end) if j >= past or j < plan.leading_tokens]
    free = [j for j in range(end) if plan.leading_tokens <= j < past]
    num_best = plan.layer_tokens(pages) - plan.tail - len(protected)
    best = sorted(free, key=lambda j: (-row[j], j))[:num_best]
    return sorted(best + protected)


@prop
@given(plans(), st.integers(1, 3), st.integers(0, 2**31 - 1), st.data())
def test_kept_positions_are_the_windows_and_the_best(plan, heads, seed, data):
    pages = data.draw(st.integers(plan.floor_pages, plan.full_pages))
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 5, (heads, plan.tokens - plan.window), generator=rng).float()
    kept = kept_positions(scores, plan, pages, TopK())
    assert kept.shape == (heads, plan.layer_tokens(pages) - plan.tail)
    assert (kept.diff(dim=1) > 0).all()
    end = plan.full_blocks * plan.block_size
    assert ((kept >= 0) & (kept < end)).all()
    window = torch.arange(min(plan.tokens - plan.window, end), end)
    assert all(torch.isin(window, row).all() for row in kept)
    assert kept.tolist() == [slow_positions(row, plan, pages) for row in scores.tolist()]


@prop
@given(plans(), st.integers(1, 3), st.integers(0, 2**31 - 1), st.data())
def test_protected_tokens_are_kept_beside_the_leading_ones(plan, heads, seed, data):
    """One length per layer gives the same slots as one length for all."""
    edges = sorted(data.draw(st.sets(st.integers(0, plan.tokens), max_size=6)))
    plan = replace(plan, spans=tuple(zip(edges[::2], edges[1::2], strict=False)))
    if plan.floor_pages > plan.full_pages:
        return
    pages = data.draw(st.integers(plan.floor_pages, plan.full_pages))
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 5, (2, heads, plan.tokens - plan.window), generator=rng).float()
    in_pages = kept_in_pages(plan, torch.tensor([pages, pages], dtype=torch.int32))
    protected = ProtectedTokens.of(
        plan.spans, plan.tokens - plan.kept_after, scores.device, plan.leading_tokens
    )
    same = dict(
        window=plan.window, width=int(in_pages[0]), selector=TopK(), leading=plan.leading_tokens
    )
    kept = kept_slots(scores, plan.tokens, in_pages, tail=plan.tail, protected=protected, **same)
    assert (kept.diff(dim=2) > 0).all()
    assert kept.min() >= plan.leading_tokens
    end = plan.full_blocks * plan.block_size
    always_kept = {token for span in plan.spans for token in range(*span)}
    always_kept |= set(range(plan.tokens - plan.kept_after, plan.tokens))
    for row in kept.flatten(0, 1).tolist():
        assert {token for token in always_kept if plan.leading_tokens <= token < end} <= set(row)
    if plan.tail > plan.window:
        return
    slots = None
    if protected is not None:
        slots = ProtectedTokens(slots=protected.slots.expand(2, heads, -1))
    lengths, tails = torch.tensor([[plan.tokens] * 2, [plan.tail] * 2], dtype=torch.int32)
    by_layer = kept_slots(scores, lengths, in_pages, tail=tails, protected=slots, **same)
    assert torch.equal(by_layer, kept)


def test_no_pages_keep_nothing():
    plan = PagePlan(num_layers=1, tokens=11, block_size=4, window=2, budget=3, pages=0)
    assert kept_positions(torch.rand(2, 9), plan, 0, TopK()).shape == (2, 0)


@prop
@given(plans_with_stats(), st.integers(0, 2**31 - 1))
def test_the_entire_method(case, seed):
    """Scores of NaN and infinity must not cost a window token or a page."""
    plan, stats = case
    rng = torch.Generator().manual_seed(seed)
    pick = torch.tensor([0.0, 1.0, torch.inf, -torch.inf, torch.nan])
    end = plan.full_blocks * plan.block_size
    kept_pages = 0
    for pages in layer_pages(Cake(), plan, stats):
        index = torch.randint(0, 5, (2, plan.tokens - plan.window), generator=rng)
        kept = kept_positions(pick[index], plan, pages, TopK())
        assert kept.shape == (2, plan.layer_tokens(pages) - plan.tail)
        assert (kept.diff(dim=1) > 0).all()
        assert all(set(range(plan.tokens - plan.window, end)) <= set(row.tolist()) for row in kept)
        kept_pages += pages
    assert kept_pages == plan.pages
