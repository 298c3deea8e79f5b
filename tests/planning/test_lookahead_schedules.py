"""A look-ahead changes which tokens are kept, and when, but not how many."""

import math
from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.planning.request import PlannedRequest
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.schedules.pieces import PieceSchedule
from vllm_kvcompress.settings.config import CompressionConfig


def lookahead_of(settings, layers, size, prompt, new):
    tokens = {"prompt": prompt, "prefilled": prompt, "max_tokens": prompt + new}
    return LookaheadSchedule(settings=settings, num_layers=layers, block_size=size, **tokens)


def footprint_of(layers, size, leading_blocks=0):
    return KVFootprint(num_layers=layers, block_size=size, leading_blocks=leading_blocks)


@given(
    prompt=st.integers(1, 5000),
    m=st.integers(1, 200),
    delay=st.integers(0, 40),
    new=st.integers(1, 400),
    layers=st.integers(1, 8),
    size=st.sampled_from([1, 16, 32, 128]),
    budget=st.floats(0.01, 1.0) | st.integers(60, 2000),
)
def test_as_much_is_held_as_without_a_look_ahead(prompt, m, delay, new, layers, size, budget):
    """To the block: a layer keeps the budget of the prompt on average, or its window."""
    raw = {"compress": "snapkv", "budget": budget, "min_prompt": 0}
    config = CompressionConfig.parse({**raw, "lookahead": m})
    ahead, tokens = lookahead_of(config, layers, size, prompt, new), prompt + m + delay
    plan = ahead.plan(footprint_of(layers, size), tokens)
    for earlier in (prompt, tokens - delay - 1):
        assert ahead.plan(footprint_of(layers, size), earlier) is None
    if tokens + 1 >= prompt + new:
        assert plan is None
        return
    budget_tokens = config.tokens_per_layer(prompt) + m + delay
    if plan is None:
        full, tail = divmod(tokens, size)
        min_pages = max(-(-(config.resolved_window - tail) // size), 1)
        pages = max(layers * (budget_tokens - tail) // size, layers * min_pages)
        # the blocks that the budget needs hold everything, so none is freed
        assert full == 0 or -(-pages // layers) >= full
        return
    assert plan.tokens == tokens
    assert plan.tail == tokens % size
    assert layers * plan.floor_pages <= plan.pages < layers * plan.full_blocks
    if plan.pages > layers * plan.floor_pages:
        kept_tokens = plan.pages * size + layers * plan.tail
        # no more blocks than the budget needs, and all pages of the last block
        extra_tokens = (layers - 1) * size if size > 1 else 0
        assert kept_tokens - extra_tokens <= layers * budget_tokens < kept_tokens + size
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
def test_protected_tokens_are_in_the_budget_or_raise_it(
    prompt, m, layers, size, budget, edges, protect
):
    """A raised budget holds other tokens' share, or half of it. Packing is at the same step."""
    raw = {"compress": "snapkv", "budget": budget, "min_prompt": 0, "lookahead": m}
    config = CompressionConfig.parse(raw | {"protect": protect})
    inside = sorted(edge for edge in edges if edge <= prompt)
    spans = tuple(zip(inside[::2], inside[1::2], strict=False))
    ahead = lookahead_of(config, layers, size, prompt, m + 100)
    footprint, tokens = footprint_of(layers, size), prompt + m
    without, plan = (each.plan(footprint, tokens) for each in (ahead, replace(ahead, spans=spans)))
    if plan is None:
        is_mostly_protected = 2 * count_before(spans, tokens) > tokens
        needs_all = layers * (tokens // size) <= min_plan_pages(ahead, spans, tokens)
        assert without is None or is_mostly_protected or needs_all
        return
    assert plan.protected_in_pages == count_before(spans, tokens - max(plan.window, tokens % size))
    assert layers * plan.floor_pages <= plan.pages < layers * plan.full_blocks
    if plan.raised:
        assert plan.pages == min_plan_pages(ahead, spans, tokens)
        assert without is None or without.pages < plan.pages
    else:
        assert plan.pages == without.pages
        holds_them = plan.pages >= min_plan_pages(ahead, spans, tokens)
        assert not spans or holds_them or not plan.protected_in_pages
    spec = plan.budget_spec
    assert spec.base >= 0
    max_tokens = plan.pages * size + layers * (plan.tail + size)
    assert spec.past_total + layers * spec.always_kept <= max_tokens


def min_plan_pages(ahead, spans, tokens):
    """Return the minimum pages for always-kept tokens and other tokens' share."""
    size, window = ahead.block_size, ahead.window(tokens)
    tail, budget_spec = tokens % size, ahead.settings.budget_spec(ahead.num_layers, ahead.prompt)
    protected = count_before(spans, tokens - max(window, tail))
    always_kept = -(-(max(window - tail, 0) + protected) // size) + 1
    budget = budget_spec.budget + ahead.output_tokens(tokens)
    share = Fraction(budget * (tokens - protected), tokens)
    unprotected = math.ceil(share if ahead.settings.protection.words else Fraction(budget, 2))
    return ahead.num_layers * max(always_kept, -(-(protected + unprotected - tail) // size))


@given(
    prompt=st.integers(600, 3000),
    m=st.integers(1, 100),
    chunk=st.integers(1, 700),
    budget=st.integers(80, 400),
)
def test_pieces_leave_the_prompts_end_to_the_look_ahead(prompt, m, chunk, budget):
    """The prompt's end is no boundary: the look-ahead packs earlier pages and later tokens."""
    layers, size = 4, 16
    raw = {"compress": "snapkv", "budget": budget, "min_prompt": 0, "lookahead": m}
    config = CompressionConfig.parse({**raw, "max_whole": 512, "piece": 128})
    sizes = {"num_layers": layers, "block_size": size, "tokens": prompt}
    pieces = PieceSchedule(settings=config, **sizes, packs_end=False)
    footprint, computed = footprint_of(layers, size), 0
    while computed < prompt:
        computed = min(computed + chunk, pieces.next_end(computed))
        plan = pieces.plan(footprint, computed)
        assert plan is None or computed < prompt
        if plan is not None:
            footprint.pack(plan, computed // size)
    packed = -(-footprint.pages // layers)
    assert pieces.blocks_at_end == packed + -(-prompt // size) - footprint.first_block
    # the output tokens take no more blocks than the pieces did
    ahead = lookahead_of(config, layers, size, prompt, 500)
    end = packed + -(-(prompt + m) // size) - footprint.first_block
    assert ahead.blocks_when_due(pieces.blocks_at_end) == end
    held = footprint.pages_at((prompt + m) // size)
    plan = ahead.plan(footprint, prompt + m)
    assert plan is not None
    assert plan.pages <= held
    kept_tokens = plan.pages * size + layers * plan.tail
    # the budget's blocks are filled
    within_budget = kept_tokens - (layers - 1) * size <= layers * (budget + m)
    assert within_budget or plan.blocks == plan.floor_pages


def test_a_cached_prompt_is_scored_by_the_computed_queries():
    """All computed queries score, up to the window's size; CAKE's variance needs two."""
    raw = {"compress": "cake", "budget": 80, "min_prompt": 0, "lookahead": 40}
    config = CompressionConfig.parse(raw)
    ahead = replace(lookahead_of(config, 4, 16, 417, 100), cached=416)
    for output_tokens in range(41):
        plan = ahead.plan_at(footprint_of(4, 16), 417 + output_tokens)
        assert (plan and plan.window) == (min(output_tokens + 1, 32) if output_tokens else None)
    # A prefix-cache hit leaves two queries at the end of the prefill, in case the pool is short,
    # and w queries when the request is due, if its output continues after a preemption.
    assert ahead.longest_prefix_hit(10_000) == 417 - 2
    assert replace(ahead, prefilled=450).longest_prefix_hit(10_000) == 417 + 40 - 32


@given(
    rest=st.integers(-20, 40),
    m=st.integers(2, 40),
    computed_output=st.integers(0, 40),
    probe=st.sampled_from([0, 8, 16, 32]),
    method=st.sampled_from(["cake-chunk", "snapkv", "cake"]),
)
def test_window_queries_lie_after_everything_packed_before(rest, m, computed_output, probe, method):
    """Also if a preempted prompt is computed again with its first output tokens."""
    layers, size, piece, spans = 4, 16, 128, ((0, 20),)
    raw = {"compress": method, "budget": 0.3, "min_prompt": 0, "lookahead": m}
    config = CompressionConfig.parse({**raw, "max_whole": 512, "piece": piece, "probe": probe})
    prompt, output_tokens = 6 * piece + rest, min(computed_output, m - 1)
    sizes = {"num_layers": layers, "block_size": size, "tokens": prompt + output_tokens}
    pieces = PieceSchedule(settings=config, **sizes, packs_end=False, spans=spans)
    footprint, computed, intact_from = footprint_of(layers, size), 0, 0
    while computed < prompt + output_tokens:
        computed = pieces.next_end(computed)
        if (plan := pieces.plan(footprint, computed)) is not None:
            assert plan.intact_from >= intact_from
            intact_from = plan.intact_from
            footprint.pack(plan, computed // size)
    assert footprint.intact_from == intact_from > 0
    ahead = replace(lookahead_of(config, layers, size, prompt, 500), spans=spans)
    ahead = replace(ahead, prefilled=prompt + output_tokens)
    for tokens in range(prompt + output_tokens, ahead.due + 1):
        if (plan := ahead.plan_at(footprint, tokens)) is not None:
            assert plan.intact_from >= intact_from
            assert plan.protected_in_pages == 20


@given(
    prompt=st.integers(1, 3000),
    m=st.integers(2, 100),
    cached=st.integers(0, 3000),
    layers=st.integers(1, 8),
    size=st.sampled_from([8, 16, 32, 128]),
    budget=st.floats(0.01, 0.99) | st.integers(60, 2000),
    factor=st.sampled_from([4, 8]),
    method=st.sampled_from(["cake-chunk", "snapkv", "cake"]),
)
def test_the_first_block_stays_whenever_the_prompt_is_packed(
    prompt, m, cached, layers, size, budget, factor, method
):
    """In k4v3: early, when due, or with the prefill, and never the block of a window token."""
    raw = {"compress": method, "budget": budget, "min_prompt": 0, "packed_dtype": "k4v3"}
    config, page_tokens = CompressionConfig.parse({**raw, "lookahead": m}), size * factor
    ahead = lookahead_of(config, layers, size, prompt, m + 100)
    ahead = replace(ahead, page_tokens=page_tokens, cached=min(cached, prompt))
    past = min(config.tokens_per_layer(prompt), prompt) - config.resolved_window
    leading_blocks = int(4 * size <= past)
    assert ahead.leading_blocks == leading_blocks
    assert replace(ahead, page_tokens=None).leading_blocks == 0
    footprint = footprint_of(layers, size, leading_blocks)
    at_end = config.page_plan(layers, prompt, size, page_tokens=page_tokens)
    if at_end is not None and at_end.cell is None:
        assert at_end.leading_blocks == leading_blocks
    for tokens in {prompt, prompt + 1, prompt + m // 2, ahead.due, ahead.due + 2}:
        plan = ahead.plan_at(footprint, tokens)
        if plan is None:
            continue
        assert plan.leading_blocks == leading_blocks
        assert plan.leading_tokens + plan.window <= plan.tokens == tokens
        assert plan.blocks <= ahead.max_kept_blocks
        budget_tokens = config.tokens_per_layer(prompt) + tokens - prompt
        kept_tokens = layers * plan.layer_tokens(plan.blocks)
        # the budget's blocks, filled
        assert kept_tokens > layers * min(budget_tokens, tokens) - page_tokens
        if plan.pages > layers * plan.floor_pages and not plan.keeps_all:
            assert kept_tokens - (layers - 1) * page_tokens <= layers * budget_tokens


@given(
    prompt=st.integers(100, 5000),
    output=st.integers(40, 900),
    lookahead=st.sampled_from([0, 32]),
    budget=st.floats(0.02, 0.99) | st.integers(60, 2000),
    size=st.sampled_from([16, 32, 128]),
    interval=st.sampled_from([None, 256]),
)
def test_planned_blocks_count_the_first_block(prompt, output, lookahead, budget, size, interval):
    """Before and after a prompt is packed in k4v3, and when its output ends."""
    raw = {"compress": "cake-chunk", "budget": budget, "min_prompt": 0, "packed_dtype": "k4v3"}
    raw |= {"lookahead": lookahead} | ({"decode_interval": interval} if interval else {})
    sizes = {"num_layers": 4, "block_size": size, "page_tokens": 4 * size}
    config = CompressionConfig.parse(raw)
    request = PlannedRequest(settings=config, **sizes, prompt=prompt, output=output)
    plan = request.plan
    if plan is None or plan.cell is not None:
        return
    assert plan.tokens == prompt + lookahead
    assert request.blocks_held(plan.tokens - 1) == -(-(plan.tokens - 1) // size)
    assert request.blocks_held(plan.tokens) == plan.held_blocks
    assert request.first_packed_at == plan.packed_end
    kept_tokens = plan.leading_tokens + plan.pages * plan.page_tokens / 4 + plan.tail
    assert request.kept_tokens == min(kept_tokens, plan.tokens) - lookahead
    unpacked_end = -(-request.cached // size) - plan.freed_blocks
    if interval is None:
        assert request.end_blocks == request.blocks_held(request.cached) == unpacked_end
    else:
        assert plan.held_blocks <= request.end_blocks <= unpacked_end
