"""When a prompt in pieces adds groups in k4v3, and the blocks it holds, from lengths alone."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.planning.memory import Sizes, _max_pages, uncompressed_prompt_blocks
from vllm_kvcompress.schedules.groups import GroupSchedule
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.outputs import OutputGroupSchedule
from vllm_kvcompress.schedules.pieces import piece_schedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

prop = settings(derandomize=True, deadline=None, max_examples=200)


def config(**more):
    defaults = {"compress": "cake", "min_prompt": 1, "packed_dtype": "k4v3", "budget": 1.0}
    return CompressionConfig.parse({**defaults, **more})


def footprint_of(layers, block):
    """Return the footprint of a request whose first block stays an ordinary block."""
    return KVFootprint(num_layers=layers, block_size=block, leading_blocks=1)


@st.composite
def prompts(draw):
    """Draw settings, layers, the block size, the tokens of a packed page and of a prompt."""
    block = draw(st.sampled_from([16, 32, 128]))
    if draw(st.booleans()):
        prompt_config = config(reuse="grid")
    else:
        piece = block * draw(st.integers(-(-48 // block), 12))
        prompt_config = config(piece=piece, max_whole=draw(st.integers(1, 40 * block)))
    page_tokens = block * draw(st.sampled_from([2, 4, 8]))
    return prompt_config, draw(st.integers(1, 5)), block, page_tokens, draw(st.integers(1, 9999))


@prop
@given(prompts())
def test_every_token_is_packed_once_within_max_blocks(case):
    """At boundaries only, in whole pages behind the first block."""
    prompt_config, layers, size, page_tokens, tokens = case
    pieces = piece_schedule(prompt_config, layers, size, tokens, page_tokens=page_tokens)
    if pieces is None:
        return
    assert isinstance(pieces, GroupSchedule)
    cell, interval = prompt_config.grid_cell(page_tokens), pieces.interval
    recent = prompt_config.recent_tokens
    recent_in_blocks = -(-recent // size) * size
    assert recent == (0 if cell else 32)
    assert cell or prompt_config.pieces.max_whole < tokens
    footprint, computed, held, ends = footprint_of(layers, size), 0, [], []
    while computed < tokens:
        start, computed = computed, pieces.next_end(computed)
        first_block = (size + recent_in_blocks) * (start == 0)
        assert start < computed <= start + interval + first_block
        assert (computed - size - recent_in_blocks) % interval == 0 or computed == tokens
        for between in {start + 1, (start + computed) // 2, computed - 1} - {start, computed}:
            assert pieces.plan(footprint, between) is None
        unpacked = -(-computed // size) - footprint.first_block
        held.append(1 + footprint.pages // layers + unpacked)
        plan = pieces.plan(footprint, computed)
        if plan is None:
            assert computed - footprint.first_block * size < page_tokens + recent_in_blocks
            continue
        ends.append(computed)
        # whole pages, from the first unpacked block on; the packing fits into the blocks it reads
        first, end = footprint.first_block, plan.packed_end
        assert (end - first * size) % page_tokens == 0
        assert (plan.pages - footprint.pages) * page_tokens == layers * (end - first * size)
        assert recent <= computed - end < (cell or page_tokens) + recent_in_blocks
        if computed < tokens:
            assert plan.tokens == end - first * size
        footprint.pack(plan, end // size)
    assert ends[0] == pieces.first_end
    assert pieces.longest_prefix_hit(tokens) <= (ends[0] if pieces.in_pieces else tokens)
    assert max(held) == pieces.max_blocks
    assert held[-1] == pieces.blocks_at_end
    assert footprint.first_block == plan.full_blocks
    assert plan == prompt_config.page_plan(layers, tokens, size, page_tokens=page_tokens)
    assert plan.keeps_all
    assert plan.layer_tokens(plan.full_pages) == tokens
    assert plan.held_blocks == 1 + plan.blocks - (-plan.tail // size)


@prop
@given(prompts(), st.data())
def test_chunks_end_at_boundaries_whatever_the_steps_limits(case, data):
    prompt_config, layers, size, page_tokens, tokens = case
    pieces = piece_schedule(prompt_config, layers, size, tokens, page_tokens=page_tokens)
    if pieces is None or not pieces.in_pieces:
        return
    footprint, computed, interval = footprint_of(layers, size), 0, pieces.interval
    seen = set()
    while computed < tokens:
        max_rows = data.draw(st.integers(interval // 3, 2 * interval))
        chunk, probe = pieces.step_limit(partial(pieces.plan, footprint), computed, max_rows)
        assert 0 < chunk <= max_rows
        assert probe == 0
        computed += chunk
        seen.add(computed)
    recent_blocks = -(-prompt_config.recent_tokens // size)
    first_end = size * (1 + recent_blocks) + interval
    assert seen >= {*range(first_end, tokens, interval), tokens}


@prop
@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([(16, 64), (128, 512)]))
def test_grids_of_a_prompt_and_its_output_are_one(prompt, output, sizes):
    """Whatever part of a sequence is the prompt, it is packed at the same tokens."""
    size, page_tokens = sizes
    settings_, layers, total = config(reuse="grid", min_prompt=0), 2, prompt + output
    packed = []
    prefill = piece_schedule(settings_, layers, size, prompt, page_tokens=page_tokens)
    decode = OutputGroupSchedule(settings=settings_, max_tokens=total, page_tokens=page_tokens)
    footprint = footprint_of(layers, size)
    for computed in range(1, total):
        schedule = prefill if computed <= prompt else decode
        if schedule is None:
            continue
        plan = schedule.plan(footprint, computed)
        if plan is not None and plan.pages > footprint.pages:
            assert plan.packed_end == computed
            packed.append(computed)
            footprint.pack(plan, plan.packed_end // size)
    cell = settings_.grid_cell(page_tokens)
    assert packed == [*range(size + cell, total, cell)]


@prop
@given(prompts())
def test_pool_and_staging_cover_every_prompt(case):
    """No shorter prompt takes more blocks than the longest, or stages more pages at once."""
    prompt_config, layers, size, _, longest = case
    page_tokens = 4 * size
    sizes = Sizes(
        layers=layers, heads=1, kv_heads=1, head_dim=64, itemsize=2, longest=longest,
        block_size=size, max_requests=1,
    )  # fmt: skip
    max_blocks = uncompressed_prompt_blocks(prompt_config, layers, size, longest)
    max_pages = _max_pages(sizes, prompt_config, prompt_config)
    assert max_blocks <= -(-longest // size)
    for tokens in {1, prompt_config.pieces.max_whole or 1, longest // 2, longest - 1, longest}:
        if not 0 < tokens <= longest:
            continue
        pieces = piece_schedule(prompt_config, layers, size, tokens, page_tokens=page_tokens)
        needed = -(-tokens // size) if pieces is None else pieces.max_blocks
        assert needed <= max_blocks
        footprint, computed = footprint_of(layers, size), 0
        while pieces is not None and computed < tokens:
            computed = pieces.next_end(computed)
            if (plan := pieces.plan(footprint, computed)) is not None:
                assert plan.pages - footprint.pages <= max_pages
                footprint.pack(plan, plan.packed_end // size)
        if pieces is None:
            plan = prompt_config.page_plan(layers, tokens, size, page_tokens=page_tokens)
            assert plan is None or plan.pages <= max_pages


@prop
@given(prompts(), st.integers(0, 60))
def test_an_output_is_cut_to_the_blocks_of_the_pool(case, more):
    """One more cached token than `max_cached_tokens` needs more blocks."""
    prompt_config, layers, size, page_tokens, tokens = case
    plan = prompt_config.page_plan(layers, tokens, size, page_tokens=page_tokens)
    if plan is None:
        return
    footprint = footprint_of(layers, size)
    footprint.pack(plan, plan.full_blocks)
    blocks = plan.held_blocks + more
    output = OutputGroupSchedule(
        settings=config(decode_interval=128), max_tokens=tokens + 9999, page_tokens=page_tokens
    )
    cached = output.max_cached_tokens(footprint, packed=plan.blocks, blocks=blocks)
    unpacked_blocks = blocks - plan.blocks - plan.leading_blocks
    assert cached >= min(tokens, size * (footprint.first_block + unpacked_blocks))
    if cached + 1 < output.max_tokens:
        assert output.max_blocks(footprint, packed=plan.blocks, tokens=cached) <= blocks
        assert output.max_blocks(footprint, packed=plan.blocks, tokens=cached + 1) > blocks


def test_worked_example():
    """6,000 tokens in 16-bit blocks of 128, pieces of 1,024: 512 tokens fill a packed page."""
    pieces = piece_schedule(config(max_whole=2000, piece=1024), 30, 128, 6000, page_tokens=512)
    footprint, packed = footprint_of(30, 128), []
    for end in (*range(1280, 6000, 1024), 6000):
        plan = pieces.plan(footprint, end)
        packed.append((end, plan.packed_end, plan.blocks))
        footprint.pack(plan, plan.packed_end // 128)
    # the first block and the last 240 tokens stay in 16 bits, and between pieces a recent block
    assert packed == [
        (1280, 1152, 2), (2304, 2176, 4), (3328, 3200, 6), (4352, 4224, 8), (5376, 5248, 10),
        (6000, 5760, 11),
    ]  # fmt: skip
    assert (pieces.first_end, pieces.longest_prefix_hit(10_000)) == (1280, 1152)
    # the first block, 8 packed blocks, a recent block and 8 of the fifth piece; the last has 10 + 6
    assert (pieces.blocks_at_end, pieces.max_blocks) == (17, 18)
    assert uncompressed_prompt_blocks(config(max_whole=2000, piece=1024), 30, 128, 6000) == 18
    # float32: 1,024 tokens fill a page; 4 pages and 1,280 tokens in 16-bit blocks before the fifth
    assert uncompressed_prompt_blocks(config(max_whole=600, piece=512), 30, 128, 6000, 4) == 14


def test_nothing_scores_a_piece():
    options = {"max_whole": 2000, "piece": 1024, "probe": 60}
    assert config(**options).scoring_query_counts == (0, 0)
    auto = config(packed_dtype="auto", budget=0.4, **options)
    assert auto.scoring_query_counts == (0, 60)
    assert config(alias="small=tova:0.4:auto", **options).scoring_query_counts == (0, 0)


def test_the_pool_covers_aliases_in_both_formats():
    """An alias may drop tokens in the cache's dtype beside an engine that keeps all in k4v3."""
    options = {"max_whole": 256, "piece": 64, "window": 8, "probe": 0}
    engine = config(**options)
    assert uncompressed_prompt_blocks(engine, 2, 16, 4096) == 1 + 62 + 2 + 4
    with_alias = config(alias={"small": "cake:512:auto"}, **options)
    assert uncompressed_prompt_blocks(with_alias, 2, 16, 4096) == 1 + 62 + 2 + 4
    alias = {"small": "cake:2048:auto"}
    with_override = config(alias=alias, allow_override="snapkv,off", **options)
    assert uncompressed_prompt_blocks(with_override, 2, 16, 4096) == (2048 + 64) // 16


RULE = "packed_dtype=k4v3 with --kv-max-whole 2000 needs a budget of 1.0, got budget={}, because"
FIX = "set the budget to 1.0, remove --kv-max-whole, or set packed_dtype to auto"


@pytest.mark.parametrize("budget", [0.4, 0.999, 4096])
def test_other_budgets_are_refused(budget):
    """The engine's, an alias's, and a request's; an allowed method has the engine's budget."""
    for more in (
        {"budget": budget},
        {"alias": f"a=tova:{budget}:k4v3"},
        {"alias": f"a=tova:{budget}:k4v3", "budget": 0.3, "packed_dtype": "auto"},
    ):
        with pytest.raises(ConfigError) as refusal:
            config(max_whole=2000, **more)
        message = str(refusal.value)
        assert RULE.format(budget) in message
        assert message.endswith(FIX)
        assert ("alias 'a': " in message) == ("alias" in more)
    assert config(max_whole=2000, budget=budget, packed_dtype="auto").budget == budget
    engine = config(max_whole=2000, allow_override="all")
    assert RequestOptions.parse(engine, {"kv_budget": 1.0}).settings.resolved_packed_dtype == "k4v3"
    in_auto = {"kv_budget": budget, "kv_packed_dtype": "auto"}
    assert RequestOptions.parse(engine, in_auto).settings.budget == budget
    for extra_args in ({"kv_budget": budget}, {"kv_budget": budget, "kv_packed_dtype": "k4v3"}):
        with pytest.raises(OverrideError) as refusal:
            RequestOptions.parse(engine, extra_args)
        assert RULE.format(budget) in str(refusal.value)


def test_bounds_that_k4v3_refuses_count_in_auto():
    options = {"max_whole": 256, "piece": 64, "window": 8}
    engine = config(allow_override="all", budget_bounds="0.1:0.5", **options)
    sizes = Sizes(
        layers=2, heads=1, kv_heads=1, head_dim=64, itemsize=2, longest=4096, block_size=16,
        max_requests=1,
    )  # fmt: skip
    assert _max_pages(sizes, engine, engine) == 2 * 2048 // 16
