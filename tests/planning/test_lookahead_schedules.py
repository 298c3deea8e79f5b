"""A look-ahead changes which tokens are kept, and when, but not how many."""

import math
from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.planning.holding import Holding
from vllm_kvcompress.planning.pieces import EveryPiece
from vllm_kvcompress.planning.schedules import LookAhead
from vllm_kvcompress.settings.config import CompressionConfig


def lookahead_of(settings, layers, size, prompt, new):
    return LookAhead(
        settings=settings,
        num_layers=layers,
        block_size=size,
        prompt=prompt,
        last=prompt + new,
        prefilled=prompt,
    )


@given(
    prompt=st.integers(1, 5000),
    m=st.integers(1, 200),
    late=st.integers(0, 40),
    new=st.integers(1, 400),
    layers=st.integers(1, 8),
    size=st.sampled_from([1, 16, 32, 128]),
    budget=st.floats(0.01, 1.0) | st.integers(60, 2000),
)
def test_from_then_on_as_much_is_held_as_without(prompt, m, late, new, layers, size, budget):
    """To the block: what a layer keeps on average of the prompt is the budget, or its window."""
    raw = {"compress": "snapkv", "budget": budget, "min_prompt": 0}
    own = CompressionConfig.parse({**raw, "lookahead": m})
    ahead, tokens = lookahead_of(own, layers, size, prompt, new), prompt + m + late
    plan = ahead.plan(Holding(num_layers=layers, block_size=size), tokens)
    assert all(
        ahead.plan(Holding(num_layers=layers, block_size=size), earlier) is None
        for earlier in (prompt, tokens - late - 1)
    )
    if tokens + 1 >= prompt + new:
        assert plan is None
        return
    granted = own.tokens_per_layer(prompt) + m + late
    if plan is None:
        full, tail = divmod(tokens, size)
        least = max(-(-(own.resolved_window - tail) // size), 1)
        pages = max(layers * (granted - tail) // size, layers * least)
        # where its blocks hold it all, none is given back
        assert full == 0 or -(-pages // layers) >= full
        return
    assert plan.tokens == tokens
    assert plan.tail == tokens % size
    assert layers * plan.floor_pages <= plan.pages < layers * plan.full_blocks
    if plan.pages > layers * plan.floor_pages:
        held = plan.pages * size + layers * plan.tail
        # no block more than the budget needs, and every page of its last one
        unneeded = (layers - 1) * size if size > 1 else 0
        assert held - unneeded <= layers * granted < held + size
        assert size == 1 or plan.pages == layers * plan.blocks


@given(
    prompt=st.integers(1, 3000),
    m=st.integers(1, 100),
    layers=st.integers(1, 8),
    size=st.sampled_from([1, 16, 32]),
    budget=st.floats(0.01, 1.0) | st.integers(60, 2000),
    edges=st.lists(st.integers(0, 3000), max_size=6, unique=True),
    protect=st.sampled_from(["none", "system"]),
)
def test_what_is_protected_is_in_the_budget_or_raises_it(
    prompt, m, layers, size, budget, edges, protect
):
    """To hold the share of others, or half of it all; it is packed at the same moment."""
    raw = {"compress": "snapkv", "budget": budget, "min_prompt": 0, "lookahead": m}
    own = CompressionConfig.parse(raw | {"protect": protect})
    inside = sorted(edge for edge in edges if edge <= prompt)
    spans = tuple(zip(inside[::2], inside[1::2], strict=False))
    ahead = lookahead_of(own, layers, size, prompt, m + 100)
    holding, tokens = Holding(num_layers=layers, block_size=size), prompt + m
    without, plan = (each.plan(holding, tokens) for each in (ahead, replace(ahead, spans=spans)))
    if plan is None:
        whole = 2 * count_before(spans, prompt + m) > prompt + m
        assert without is None or whole or layers * (tokens // size) <= least(ahead, spans, tokens)
        return
    assert plan.guarded == count_before(spans, tokens - max(plan.window, tokens % size))
    assert layers * plan.floor_pages <= plan.pages < layers * plan.full_blocks
    if plan.raised:
        assert plan.pages == least(ahead, spans, tokens)
        assert without is None or without.pages < plan.pages
    else:
        assert plan.pages == without.pages
        assert not spans or plan.pages >= least(ahead, spans, tokens) or not plan.guarded
    prompt_seen = plan.prompt
    assert prompt_seen.base >= 0
    assert prompt_seen.past_total + layers * prompt_seen.standing <= plan.pages * size + layers * (
        plan.tail + size
    )


def least(ahead, spans, tokens):
    """Pages of what must stand and one more in each layer, or of others' part of the budget."""
    size, window = ahead.block_size, ahead.window(tokens)
    tail, own = tokens % size, ahead.settings.prompt(ahead.num_layers, ahead.prompt)
    guarded = count_before(spans, tokens - max(window, tail))
    standing = -(-(max(window - tail, 0) + guarded) // size) + 1
    budget = own.budget + ahead.answered(tokens)
    share = Fraction(budget * (tokens - guarded), tokens)
    others = math.ceil(share if ahead.settings.protect else Fraction(budget, 2))
    return ahead.num_layers * max(standing, -(-(guarded + others - tail) // size))


@given(
    prompt=st.integers(600, 3000),
    m=st.integers(1, 100),
    chunk=st.integers(1, 700),
    budget=st.integers(80, 400),
)
def test_pieces_leave_what_the_answer_judges(prompt, m, chunk, budget):
    """Its end is no boundary: what was packed by then and what came since is packed after it."""
    layers, size = 4, 16
    raw = {"compress": "snapkv", "budget": budget, "min_prompt": 0, "lookahead": m}
    own = CompressionConfig.parse({**raw, "max_whole": 512, "piece": 128})
    pieces = EveryPiece(
        settings=own, num_layers=layers, block_size=size, tokens=prompt, packs_end=False
    )
    holding, computed = Holding(num_layers=layers, block_size=size), 0
    while computed < prompt:
        computed = min(computed + chunk, pieces.next_end(computed))
        plan = pieces.plan(holding, computed)
        assert plan is None or computed < prompt
        if plan is not None:
            holding.pack(plan, computed // size)
    packed = -(-holding.pages // layers)
    assert pieces.ending == packed + -(-prompt // size) - holding.first_block
    # where its end leaves room for them, its answer's tokens take no more than its pieces did
    ahead = lookahead_of(own, layers, size, prompt, 500)
    end = packed + -(-(prompt + m) // size) - holding.first_block
    assert ahead.held_blocks(pieces.ending) == end
    held = holding.pages_at((prompt + m) // size)
    plan = ahead.plan(holding, prompt + m)
    assert plan is not None
    assert plan.pages <= held
    kept = plan.pages * size + layers * plan.tail
    # the budget's blocks are filled
    assert kept - (layers - 1) * size <= layers * (budget + m) or plan.blocks == plan.floor_pages


def test_a_prompt_that_was_cached_is_judged_by_the_rows_that_were_computed():
    """All of them, until there are as many as the window has; CAKE's variance needs two."""
    raw = {"compress": "cake", "budget": 80, "min_prompt": 0, "lookahead": 40}
    own = CompressionConfig.parse(raw)
    ahead = replace(lookahead_of(own, 4, 16, 417, 100), cached=416)
    for answered in range(41):
        plan = ahead.kept(Holding(num_layers=4, block_size=16), 417 + answered)
        assert (plan and plan.window) == (min(answered + 1, 32) if answered else None)
    # at most so much may be cached that two are there at its prefill's end, for when the pool is
    # short; and where an answer goes on, or it would be judged by fewer than w when it is due
    assert ahead.longest_hit == 417 - 2
    assert replace(ahead, prefilled=450).longest_hit == 417 + 40 - 32


@given(
    rest=st.integers(-20, 40),
    m=st.integers(2, 40),
    t=st.integers(0, 40),
    probe=st.sampled_from([0, 8, 16, 32]),
    method=st.sampled_from(["cake-chunk", "snapkv", "cake"]),
)
def test_a_window_of_what_is_protected_lies_behind_what_was_packed(rest, m, t, probe, method):
    """Also where a preempted prompt is computed again with the first tokens of its answer."""
    layers, size, piece, spans = 4, 16, 128, ((0, 20),)
    raw = {"compress": method, "budget": 0.3, "min_prompt": 0, "lookahead": m}
    own = CompressionConfig.parse({**raw, "max_whole": 512, "piece": piece, "probe": probe})
    prompt, answered = 6 * piece + rest, min(t, m - 1)
    pieces = EveryPiece(
        settings=own,
        num_layers=layers,
        block_size=size,
        tokens=prompt + answered,
        packs_end=False,
        spans=spans,
    )
    holding, computed, settled = Holding(num_layers=layers, block_size=size), 0, 0
    while computed < prompt + answered:
        computed = pieces.next_end(computed)
        if (plan := pieces.plan(holding, computed)) is not None:
            assert plan.settled >= settled
            settled = plan.settled
            holding.pack(plan, computed // size)
    assert holding.settled == settled > 0
    ahead = replace(lookahead_of(own, layers, size, prompt, 500), spans=spans)
    ahead = replace(ahead, prefilled=prompt + answered)
    for tokens in range(prompt + answered, ahead.due + 1):
        if (plan := ahead.kept(holding, tokens)) is not None:
            assert plan.settled >= settled
            assert plan.guarded == 20
