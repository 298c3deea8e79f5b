"""When an output is packed again, and the pages it may hold, computed from lengths alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.outputs import OutputSchedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

prop = settings(derandomize=True, deadline=None, max_examples=150)


def config(**more):
    return CompressionConfig.parse({"compress": "snapkv", "min_prompt": 1, **more})


@st.composite
def outputs(draw):
    """Draw a request whose prefill has ended: its schedule, footprint and packed blocks."""
    block = draw(st.sampled_from([1, 4, 16]))
    interval = block * draw(st.integers(1, 6))
    window = draw(st.integers(1, min(interval, 8)))
    layers, prompt = draw(st.integers(1, 5)), draw(st.integers(1, 30 * block))
    decode_budget = draw(st.integers(window + 1, 25 * block + window + 1))
    decode = dict(decode_budget=decode_budget, decode_interval=interval, decode_window=window)
    engine_config = config(window=window, budget=draw(st.floats(0.05, 1.0)), **decode)
    max_tokens = prompt + draw(st.integers(1, 60 * block))
    protected = draw(st.sampled_from([0, 1, prompt // 3, prompt // 2]))
    spans = ((0, protected),) if protected else ()
    schedule = OutputSchedule(
        settings=engine_config, prefilled=prompt, max_tokens=max_tokens, spans=spans
    )
    footprint = KVFootprint(num_layers=layers, block_size=block)
    plan = engine_config.page_plan(layers, prompt, block, spans)
    if plan is not None:
        footprint.pack(plan, prompt // block)
    return schedule, footprint, 0 if plan is None else plan.blocks


@prop
@given(outputs())
def test_held_pages_stay_within_the_cap(case):
    """From the first packing on, pages are exact, and the host's bound on a layer's pages holds."""
    schedule, footprint, packed = case
    size, layers, frozen = footprint.block_size, footprint.num_layers, None
    interval, window = schedule.settings.decode.interval, schedule.settings.resolved_decode_window
    for tokens in range(schedule.prefilled + 1, schedule.max_tokens):
        held_blocks = packed + -(-tokens // size) - footprint.first_block
        if footprint.frozen:
            assert held_blocks <= -(-schedule.cap(footprint) // layers) + interval // size + 1
        plan = schedule.plan(footprint, tokens)
        if plan is None:
            continue
        before = footprint.pages + layers * (tokens // size - footprint.first_block)
        assert tokens % size == 0
        assert tokens - footprint.first_block * size >= interval
        assert tokens + 1 < schedule.max_tokens
        assert plan.pages < before
        always_kept = window + count_before(schedule.spans, schedule.prefilled)
        assert plan.floor_pages == max(-(-always_kept // size), 1)
        assert layers * plan.floor_pages <= plan.pages
        assert -(-before // layers) <= plan.full_blocks
        assert plan.tail == 0
        if frozen is not None:
            assert plan.pages == frozen
        packed, frozen = plan.blocks, plan.pages
        footprint.pack(plan, tokens // size, freeze=True)
        assert footprint.max_layer_pages * layers >= footprint.pages


@prop
@given(outputs())
def test_queries_are_summed_before_the_ring_overwrites_them(case):
    """The workers keep the queries of one interval."""
    schedule, footprint, _ = case
    schedule.summed_tokens = schedule.prefilled
    size, interval, summed = footprint.block_size, schedule.settings.decode.interval, 0
    for tokens in range(schedule.prefilled + 1, schedule.max_tokens):
        plan = schedule.plan(footprint, tokens)
        assert tokens - schedule.summed_tokens <= interval
        num_queries = schedule.advance_sums(tokens, size, packs=plan is not None)
        assert not num_queries or plan is not None or tokens % size == 0
        summed += num_queries
        assert summed == schedule.summed_tokens - schedule.prefilled
        if plan is not None:
            assert schedule.summed_tokens == tokens
            footprint.pack(plan, tokens // size, freeze=True)


@prop
@given(outputs())
def test_may_pack_says_whether_any_step_packs(case):
    schedule, footprint, _ = case
    steps = range(schedule.prefilled + 1, schedule.max_tokens)
    assert schedule.may_pack(footprint) == any(schedule.plan(footprint, tokens) for tokens in steps)


@prop
@given(outputs())
def test_max_blocks_is_the_exact_maximum(case):
    schedule, footprint, packed = case
    max_blocks = schedule.max_blocks(footprint, packed=packed, tokens=schedule.max_tokens - 1)
    size, packed_blocks, held_blocks = footprint.block_size, packed, []
    for tokens in range(schedule.prefilled, schedule.max_tokens):
        held_blocks.append(packed_blocks + -(-tokens // size) - footprint.first_block)
        plan = schedule.plan(footprint, tokens) if tokens > schedule.prefilled else None
        if plan is not None:
            packed_blocks = plan.blocks
            footprint.pack(plan, tokens // size, freeze=True)
    assert max_blocks == max(held_blocks)


@pytest.mark.parametrize(
    ("raw_settings", "message"),
    [
        (
            {"decode_interval": 64},
            "--kv-decode-interval needs --kv-decode-budget or --kv-packed-dtype k4v3; set --kv-d",
        ),
        (
            {"decode_window": 4},
            "decode_window needs --kv-decode-budget; set --kv-decode-budget, or",
        ),
        (
            {"decode_budget": 8},
            "decode_budget=8 tokens per layer cannot hold the decode window of 8 tokens",
        ),
        ({"decode_budget": 0}, "decode_budget"),
        (
            {"decode_budget": 9, "compress": "cake-chunk"},
            "decode_budget=9 tokens per layer cannot hold the decode window of 8 tokens and 2"
            " chunks of 20 tokens; set decode_budget to at least 48",
        ),
        ({"decode_budget": 47, "compress": "cake-chunk"}, "set decode_budget to at least 48"),
        ({"decode_budget": 27, "compress": "chunkkv"}, "set decode_budget to at least 28"),
        (
            {"decode_budget": 39, "selector": "chunks", "selector_params": {"size": 16}},
            "and 2 chunks of 16 tokens; set decode_budget to at least 40",
        ),
        ({"decode_budget": 12.5}, "decode_budget must be a whole number of tokens, got 12.5"),
        ({"decode_budget": True}, "decode_budget must be a whole number of tokens, got True"),
        ({"decode_budget": 64, "decode_window": 0}, "decode_window must be at least 1"),
        (
            {"decode_budget": 64, "decode_window": 1, "compress": "cake"},
            "decode_window must be at least 2",
        ),
        ({"decode_budget": 64, "decode_interval": 4}, "queries of one interval, got 8"),
    ],
)
def test_invalid_settings_are_refused(raw_settings, message):
    with pytest.raises(ConfigError) as refused:
        config(**raw_settings)
    assert message in str(refused.value)


def test_minimum_decode_budgets():
    """The minimum applies to the server's flag, allowed methods, aliases and requests."""
    minimum = {"cake-chunk": 48, "chunkkv": 28, "snapkv": 9, "streamingllm": 1}
    for method, min_budget in minimum.items():
        engine_config = config(compress=method, decode_budget=min_budget)
        assert engine_config.min_decode_budget == min_budget
    server = {"decode_budget": 32, "compress": "snapkv"}
    with pytest.raises(ConfigError, match="allow_override='cake-chunk': decode_budget=32"):
        config(**server, allow_override="cake-chunk")
    with pytest.raises(ConfigError, match="alias 'short': decode_budget=32"):
        config(**server, alias={"short": "cake-chunk:0.2"})
    server_config = config(compress="cake-chunk", decode_budget=64, allow_override="cake-chunk")
    with pytest.raises(OverrideError, match=r"decode_budget=17 .* at least 48"):
        RequestOptions.parse(server_config, {"kv_decode_budget": 17})
    chosen = RequestOptions.parse(server_config, {"kv_decode_budget": 48}).settings
    assert chosen.decode.budget == 48


def test_decode_windows_of_each_method():
    for name, window in {"tova": 1, "streamingllm": 0, "cake": 8, "cake-chunk": 8}.items():
        assert config(compress=name, decode_budget=64).resolved_decode_window == window
    assert config(decode_budget=64, decode_window=20).resolved_decode_window == 20
