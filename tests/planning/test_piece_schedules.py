"""When a prompt in pieces is packed, and the pages it holds, from lengths alone."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import pages_kept
from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.planning.memory import Sizes, _max_pages, uncompressed_prompt_blocks
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.schedules.pieces import piece_schedule
from vllm_kvcompress.settings.config import CompressionConfig

prop = settings(derandomize=True, deadline=None, max_examples=200)


def config(**more):
    return CompressionConfig.parse({"compress": "snapkv", "min_prompt": 1, **more})


@st.composite
def probes(draw):
    num_last = draw(st.sampled_from([0, 1, 2, 3, 32]))
    num_first = draw(st.sampled_from([0, 1, 20])) if num_last else 0
    return {"probe": num_last, "probe_first": num_first}


@st.composite
def prompts(draw):
    """Draw settings, layers, the block size and the tokens of a prompt."""
    block = draw(st.sampled_from([1, 4, 16]))
    window = draw(st.integers(1, 12))
    piece = block * draw(st.integers(window // block + 1, window // block + 8))
    probe_settings = draw(probes())
    min_piece = max(2, sum(probe_settings.values()) - 1)
    budget = draw(st.floats(0.02, 1.0) | st.integers(window + 1, 20 * block + window + 1))
    raw = {"piece": max(piece, block * (min_piece // block + 1)), **probe_settings}
    raw |= {"compress": draw(st.sampled_from(["snapkv", "pyramidkv", "cake"]))}
    raw |= {"max_whole": draw(st.integers(1, 40 * block)), "window": max(window, 2)}
    raw |= {"budget": budget if isinstance(budget, float) else max(budget, 4)}
    raw |= {"protect": draw(st.sampled_from(["none", "system"]))}
    return config(**raw), draw(st.integers(1, 5)), block, draw(st.integers(1, 90 * block))


def sizes_of(layers, size, longest):
    """Return the sizes of an engine for one request of up to `longest` tokens."""
    model = {"layers": layers, "heads": 1, "kv_heads": 1, "head_dim": 1, "itemsize": 1}
    return Sizes(**model, longest=longest, block_size=size, max_requests=1)


@prop
@given(prompts(), st.lists(st.integers(0, 400), max_size=6, unique=True))
def test_held_pages_stay_within_the_limit(case, edges):
    """Pages are exact at every boundary, and the host's bound on a layer's pages holds.

    Protected spans may be anything: those that need more than the limit are refused before.
    """
    prompt_config, layers, size, tokens = case
    edges = sorted(edge for edge in edges if edge < tokens)
    spans = tuple(zip(edges[::2], edges[1::2], strict=False))
    pieces = piece_schedule(prompt_config, layers, size, tokens, spans)
    if pieces is None or pieces.protection_too_large:
        return
    footprint = KVFootprint(num_layers=layers, block_size=size)
    first_end, max_blocks, computed, packed = pieces.first_end, pieces.max_blocks, 0, 0
    assert prompt_config.pieces.max_whole < tokens
    # pages beyond the budget take no more memory than an uncompressed prompt
    kept = -(-pages_kept(prompt_config.budget_spec(layers, tokens), 0, size) // layers)
    probe_tokens, max_whole = prompt_config.method.probe_tokens, prompt_config.pieces.max_whole
    piece_and_probe = prompt_config.pieces.length // size - (-probe_tokens // size)
    assert max_blocks <= max(max_whole // size, kept + piece_and_probe)
    assert first_end < tokens
    while computed < tokens:
        start, computed = computed, pieces.next_end(computed)
        assert start < computed <= start + prompt_config.pieces.length
        assert computed % prompt_config.pieces.length == 0 or computed == tokens
        probe = pieces.step_limit(partial(pieces.plan, footprint), start, tokens - start)[1]
        assert packed + -(-(computed + probe) // size) - footprint.first_block <= max_blocks
        for between in range(start + 1, computed):
            assert pieces.plan(footprint, between) is None
        plan = pieces.plan(footprint, computed)
        assert (plan is not None) == (computed >= first_end)
        assert probe == (0 if plan is None else plan.probe) <= min(probe_tokens, tokens)
        if plan is None:
            continue
        held = footprint.pages + layers * (computed // size - footprint.first_block)
        assert plan.protected_in_pages == count_before(spans, plan.intact_from) <= computed
        assert layers * plan.floor_pages <= plan.pages <= held
        assert plan.pages < held or computed == tokens
        assert plan.tail == (tokens % size if computed == tokens else 0) + probe
        assert -(-held // layers) <= plan.full_blocks
        assert not packed or plan.blocks <= packed
        packed = plan.blocks
        footprint.pack(plan, computed // size)
        assert footprint.max_layer_pages * layers >= footprint.pages
    # At its end it keeps as much as an uncompressed prompt would, but protected tokens raise it to
    # at most the pages held between pieces.
    with_spans = prompt_config.page_plan(layers, tokens, size, spans)
    without_spans = prompt_config.page_plan(layers, tokens, size)
    assert without_spans is not None
    assert with_spans is not None or spans
    assert with_spans is None or footprint.pages == min(
        with_spans.pages, held, max(pieces.held_pages, without_spans.pages)
    )


@prop
@given(prompts())
def test_pool_for_one_request(case):
    """No shorter or uncompressed prompt takes more blocks than the longest."""
    prompt_config, layers, size, longest = case
    max_blocks = uncompressed_prompt_blocks(prompt_config, layers, size, longest)
    assert max_blocks <= -(-longest // size)
    max_whole = prompt_config.pieces.max_whole
    for tokens in {1, max_whole, max_whole + 1, longest // 2, longest - 1, longest}:
        if not 0 < tokens <= longest:
            continue
        pieces = piece_schedule(prompt_config, layers, size, tokens)
        needed = -(-tokens // size) if pieces is None else pieces.max_blocks
        assert needed <= max_blocks


@prop
@given(prompts())
def test_staging_covers_all_held_pages(case):
    """For every prompt up to the longest, between its pieces and at its end."""
    prompt_config, layers, size, longest = case
    max_pages = _max_pages(sizes_of(layers, size, longest), prompt_config, prompt_config)
    for tokens in {prompt_config.pieces.max_whole + 1, longest // 2, longest - 1, longest}:
        if 0 < tokens <= longest:
            pieces = piece_schedule(prompt_config, layers, size, tokens)
            assert pieces is None or pieces.held_pages <= max_pages


@prop
@given(
    longest=st.integers(2, 3000),
    layers=st.integers(1, 8),
    size=st.sampled_from([1, 16, 128]),
    budget=st.floats(0.01, 0.99) | st.integers(40, 2000),
    lookahead=st.sampled_from([0, 32]),
    span=st.tuples(st.integers(0, 3000), st.integers(0, 1500)),
    protect=st.sampled_from(["none", "system"]),
    output_tokens=st.integers(0, 400),
)
def test_staging_covers_raised_budgets(
    longest, layers, size, budget, lookahead, span, protect, output_tokens
):
    """For every prompt up to the longest, whatever its budget is raised to.

    Also if it comes again with an output, when the window's protected tokens are in pages.
    """
    prompt_config = config(budget=budget, protect=protect, lookahead=lookahead, min_prompt=0)
    max_pages = _max_pages(sizes_of(layers, size, longest), prompt_config, prompt_config)
    for tokens in {1, longest // 2, longest - lookahead - 1, longest - lookahead}:
        first_tokens = tokens - output_tokens
        start, stop = min(span[0], first_tokens), min(sum(span), first_tokens)
        spans = ((start, stop),) if start < stop else ()
        if first_tokens < 1:
            continue
        plan, without_spans = (
            prompt_config.page_plan(layers, first_tokens, size, each) for each in (spans, ())
        )
        if without_spans is None:
            continue  # it stays uncompressed, then and later
        if protect == "none" and (plan is None or plan.raised):
            continue  # refused
        lookahead_schedule = LookaheadSchedule(
            settings=prompt_config, num_layers=layers, block_size=size, prompt=tokens,
            max_tokens=longest + 2, prefilled=tokens, spans=spans,
        )  # fmt: skip
        footprint = KVFootprint(num_layers=layers, block_size=size)
        plan = lookahead_schedule.plan_at(footprint, tokens + lookahead)
        assert plan is None or plan.pages <= max_pages


@prop
@given(prompts(), st.data())
def test_steps_stay_within_their_limit_and_the_prompt(case, data):
    """Whatever the steps' limits, the same tokens score at the same boundaries."""
    prompt_config, layers, size, tokens = case
    pieces = piece_schedule(prompt_config, layers, size, tokens)
    if pieces is None:
        return

    def boundaries_and_probes(step_limits):
        footprint, computed, found = KVFootprint(num_layers=layers, block_size=size), 0, []
        while computed < tokens:
            max_rows = min(next(step_limits), tokens - computed)
            chunk, probe = pieces.step_limit(partial(pieces.plan, footprint), computed, max_rows)
            assert 0 <= chunk + probe <= max_rows
            # a step that reaches the prompt's end would sample a token
            assert probe == 0 or computed + chunk + probe < tokens
            computed += chunk
            plan = pieces.plan(footprint, computed) if chunk else None
            if plan is not None:
                assert plan.probe == probe
                found.append((computed, probe))
                footprint.pack(plan, computed // size)
        return found

    rows = prompt_config.method.probe_tokens
    step_limits = st.integers(rows + 1, rows + prompt_config.pieces.length + 5)
    limited = boundaries_and_probes(iter(lambda: data.draw(step_limits), None))
    assert limited == boundaries_and_probes(iter(lambda: tokens, None))


def test_worked_example():
    """6,000 tokens, a tenth of them kept, blocks of 128, pieces of 1,024, 30 layers."""
    options = {"budget": 0.1, "piece": 1024, "window": 32, "probe": 60, "probe_first": 40}
    prompt_config = config(max_whole=2000, **options)
    pieces = piece_schedule(prompt_config, 30, 128, 6000)
    footprint, ends, kept = KVFootprint(num_layers=30, block_size=128), [], []
    while not ends or ends[-1] < 6000:
        ends.append(pieces.next_end(ends[-1] if ends else 0))
        plan = pieces.plan(footprint, ends[-1])
        kept.append(plan.pages)
        footprint.pack(plan, ends[-1] // 128)
    assert ends == [1024, 2048, 3072, 4096, 5120, 6000]
    # 2,000 tokens minus a piece and a probe, in full blocks; at the end 488 tokens before the tail
    # of 112 need 114 pages, whose 4 blocks have 120
    assert kept == [30 * 6] * 5 + [30 * 4]
    assert pieces.max_blocks == 6 + 8 + 1
    # the budget if it is larger: 600 tokens per layer, 140 pages, in 5 blocks
    small_limit = piece_schedule(config(max_whole=1500, **options), 30, 128, 6000)
    assert small_limit.held_pages == 30 * 5
    assert small_limit.max_blocks == 5 + 8 + 1
    assert [pieces.probe(end) for end in (1024, 5120, 5950, 5999, 6000)] == [100, 100, 49, 0, 0]
    # fewer rows than a window may be only the template's, so the piece's own tokens score
    assert [pieces.probe(end) for end in (5967, 5968)] == [32, 0]
    # an uncompressed prompt of up to 2,000 tokens
    assert uncompressed_prompt_blocks(prompt_config, 30, 128, 6000) == 16
    assert uncompressed_prompt_blocks(config(), 30, 128, 6000) == 47


def test_methods_without_a_probe():
    """A probe is dropped: no token may merge into it, and it needs a method that reads queries."""
    options = {"budget": 0.1, "max_whole": 2000, "piece": 1024, "probe": 60}
    for other_options in ({"merge": True}, {"merge": "values"}, {"compress": "h2o"}, {"probe": 0}):
        pieces = piece_schedule(config(**(options | other_options)), 30, 128, 6000)
        plan = partial(pieces.plan, KVFootprint(num_layers=30, block_size=128))
        assert pieces.step_limit(plan, 0, 4096) == (1024, 0)


def test_scoring_queries_of_methods_that_requests_may_choose():
    options = {"max_whole": 2000, "piece": 1024, "probe": 60}
    assert config(compress="off", allow_override="all", **options).scoring_query_counts == (0, 60)
    assert config(compress="off", allow_override="h2o", **options).scoring_query_counts == (0, 0)
    assert config(compress="h2o", allow_override="all", **options).scoring_query_counts == (0, 0)
    assert config(compress="off").scoring_query_counts == (0, 0)
    assert config(**options, probe_first=40).scoring_query_counts == (40, 60)


def test_the_pool_covers_default_and_alias_budgets():
    options = {"budget": 64, "max_whole": 256, "piece": 64, "window": 8}
    for more in ({}, {"allow_override": "tova,off"}):
        assert uncompressed_prompt_blocks(config(**options, **more), 2, 16, 4096) == 16
    with_alias = config(**options, alias={"more": "snapkv:512"})
    blocks = (512 + 64 + with_alias.method.probe_tokens) // 16
    assert uncompressed_prompt_blocks(with_alias, 2, 16, 4096) == blocks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"piece": 64}, "--kv-piece needs --kv-max-whole; set --kv-max-whole, or"),
        ({"probe": 8}, "--kv-probe needs --kv-max-whole; set --kv-max-whole, or"),
        ({"probe": 0.5, "max_whole": 64}, "probe must be a whole number of tokens, got 0.5"),
        ({"probe": -1, "max_whole": 64}, "probe: .*greater than or equal to 0, got -1"),
        ({"probe_first": 8}, "--kv-probe-first needs --kv-max-whole; set --kv-max-whole, or"),
        (
            {"probe": 0, "probe_first": 8, "max_whole": 64},
            "got --kv-probe 0 and --kv-probe-first 8; set --kv-probe above 0, or remove"
            " --kv-probe-first",
        ),
        (
            {"probe": 600, "probe_first": 500, "max_whole": 64},
            "probe and probe_first must be at most 1024 tokens together, got 600 and 500",
        ),
        (
            {"max_whole": 64, "piece": 48, "probe": 32, "probe_first": 17},
            "must be at most piece together, got 32 and 17 with piece 48; raise piece",
        ),
        ({"max_whole": 64, "min_prompt": 65}, "max_whole must be at least min_prompt=65.*got 64"),
        (
            {"max_whole": 64, "piece": 8, "window": 8},
            "piece must be above the observation window of 8, got 8",
        ),
        ({"max_whole": 0}, "max_whole: .*greater than or equal to 1, got 0"),
        ({"max_whole": True}, "max_whole must be a whole number of tokens, got True"),
        ({"piece": 64.5, "max_whole": 64}, "piece must be a whole number of tokens, got 64.5"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        config(**options)
