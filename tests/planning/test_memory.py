"""Reserved memory covers every request, and not much more."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.planning.memory import (
    HOST_SLOT_BLOCKS,
    Sizes,
    extra_bytes,
    group_bytes,
    host_slots,
    reserved_bytes,
    ring_bytes,
    ring_slots,
    scored_tokens,
    scratch_blocks,
    table_bytes,
    table_columns,
)
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

SIZES = Sizes(
    layers=4, heads=8, kv_heads=2, head_dim=64, itemsize=2, longest=4099, block_size=16,
    max_requests=8,
)  # fmt: skip
METHODS = st.sampled_from(sorted(PRESETS))
BUDGETS = st.sampled_from([0.05, 0.2, 0.5, 0.9, 1.0, 64, 700, 4000, 5000])
BOUNDS = st.sampled_from(["", "0.05:0.3", "64:900", "0.1:0.4,100:2000"])
FORMATS = st.sampled_from(["auto", "k4v3"])


@st.composite
def engines(draw):
    """Draw the settings of an engine; None if they contradict each other."""
    raw_settings = {"compress": draw(METHODS | st.just("off")), "budget": draw(BUDGETS)}
    if draw(st.booleans()):
        methods = draw(st.lists(METHODS, min_size=1, max_size=3))
        raw_settings |= {"allow_override": methods}
        if bounds := draw(BOUNDS):
            raw_settings |= {"budget_bounds": bounds}
    if draw(st.booleans()):
        raw_settings |= {"packed_dtype": draw(FORMATS)}
    meanings = st.tuples(METHODS, BUDGETS) | st.tuples(METHODS, BUDGETS, FORMATS)
    aliases = draw(st.dictionaries(st.sampled_from("ab"), meanings, max_size=2))
    aliases = {name: ":".join(map(str, meaning)) for name, meaning in aliases.items()}
    raw_settings |= {"alias": aliases}
    try:
        engine = CompressionConfig.parse(raw_settings)
    except ConfigError:
        return None
    return engine if engine.active else None


REQUESTS = {"kv_compress": METHODS, "kv_budget": BUDGETS | st.floats(0.01, 0.999)}
REQUESTS |= {"kv_alias": st.sampled_from("ab"), "kv_packed_dtype": FORMATS}


@settings(max_examples=400, deadline=None, derandomize=True)
@given(engines(), st.fixed_dictionaries({}, optional=REQUESTS))
def test_no_request_takes_more_than_is_reserved(engine, request_args):
    if engine is None:
        return
    try:
        config = RequestOptions.parse(engine, request_args).settings
    except OverrideError:
        return
    if config is not None:
        assert extra_bytes(SIZES, config) <= extra_bytes(SIZES, engine)


@pytest.mark.parametrize(
    ("engine", "requests"),
    [
        ({"compress": "off", "alias": "a=d2o:0.05"}, [{"kv_alias": "a"}]),
        ({"compress": "off", "budget": 0.9, "alias": "a=d2o:0.05"}, [{"kv_alias": "a"}]),
        ({"compress": "snapkv", "budget": 0.9, "alias": "a=d2o:0.05"}, [{}, {"kv_alias": "a"}]),
        (
            {"compress": "snapkv", "budget": 0.1, "alias": "a=snapkv:0.8:k4v3"},
            [{}, {"kv_alias": "a"}],
        ),
        (
            {"compress": "off", "packed_dtype": "k4v3", "allow_override": "d2o"}
            | {"budget_bounds": "0.1:0.6"},
            [{"kv_compress": "d2o", "kv_budget": 0.6, "kv_packed_dtype": "auto"}],
        ),
        (
            {"compress": "off", "allow_override": "tova", "budget_bounds": "16:64", "budget": 64}
            | {"alias": "a=d2o:0.05"},
            [{"kv_compress": "tova"}, {"kv_alias": "a"}, {"kv_alias": "a", "kv_budget": 64}],
        ),
    ],
)
def test_little_more_is_reserved_than_requests_can_take(engine, requests):
    """The sum may combine one method's window with another method's scores."""
    engine = CompressionConfig.parse(engine)
    largest = max(
        extra_bytes(SIZES, RequestOptions.parse(engine, args).settings) for args in requests
    )
    # the constant scratch memory for k4v3, whichever request uses it
    scratch = group_bytes(SIZES, engine)
    assert largest <= extra_bytes(SIZES, engine) <= 1.01 * largest + scratch


def test_an_aliass_budget_counts_for_other_methods_under_the_alias():
    """Bounds do not limit an alias, and d2o stages more than snapkv does."""
    engine = CompressionConfig.parse(
        {"compress": "snapkv", "budget": 0.1, "allow_override": "d2o", "budget_bounds": "0.1:0.2"}
        | {"alias": {"most": "snapkv:0.9"}}
    )
    config = RequestOptions.parse(engine, {"kv_alias": "most", "kv_compress": "d2o"}).settings
    assert (config.compress, config.budget) == ("d2o", 0.9)
    assert extra_bytes(SIZES, config) <= extra_bytes(SIZES, engine)


@pytest.mark.parametrize("aggregate", ["max", "defensive"])
def test_a_maximum_takes_one_more_tensor(aggregate):
    plain, with_maximum = (
        CompressionConfig.parse({"compress": "snapkv", "budget": 0.2, "scorer_params": params})
        for params in ({}, {"aggregate": aggregate})
    )
    tensor_bytes = SIZES.heads * scored_tokens(SIZES.layers, SIZES.longest) * 4
    assert extra_bytes(SIZES, with_maximum) - extra_bytes(SIZES, plain) == tensor_bytes


def config_in_pieces(**options):
    options = {"compress": "snapkv", "max_whole": 2048, "piece": 1024, **options}
    return CompressionConfig.parse({key: value for key, value in options.items() if value})


HUGE = Sizes(
    layers=32, heads=32, kv_heads=8, head_dim=128, itemsize=2, longest=1_000_000, block_size=16,
    max_requests=256,
)  # fmt: skip
ALL_COLUMNS = 62_512
"""Blocks of the longest sequence, in rows of 64 bytes."""


@pytest.mark.parametrize(
    ("options", "blocks", "columns"),
    [
        # equal shares: each layer reads as many pages as the request holds blocks
        ({"compress": "snapkv", "budget": 0.1}, 15_000, 15_008),
        ({"compress": "chunkkv", "budget": 1024}, 2_000, 2_000),
        # 1,024 tokens keep 64 blocks; one layer may have all but the other layers' minimum
        ({"compress": "cake", "budget": 1024}, 2_000, 4_016),
        ({"compress": "cake", "budget": 1024, "decode_budget": 2048}, 2_000, 2_000 + 128 * 31),
        # a tenth of a million tokens, and one layer may have almost all of it
        ({"compress": "cake", "budget": 0.1}, 15_000, ALL_COLUMNS),
        ({"compress": "snapkv", "budget": 0.1, "allow_override": "cake"}, 15_000, ALL_COLUMNS),
        # never wider than the longest sequence
        ({"compress": "snapkv", "budget": 0.1}, 100_000, ALL_COLUMNS),
        ({"compress": "snapkv", "budget": 0.1}, None, ALL_COLUMNS),
        ({"budget": 0.1, "max_whole": None, "piece": None}, 15_000, ALL_COLUMNS),
    ],
)
def test_tables_are_limited_by_the_pool(options, blocks, columns):
    config = config_in_pieces(**options)
    assert table_columns(HUGE, config, blocks) == columns
    needed = 32 * 4 * columns * (2 * 256 + 1)
    assert needed <= table_bytes(HUGE, config, blocks) <= 1.01 * needed


def test_memory_is_reserved_only_for_tokens_that_a_layer_can_hold():
    config = config_in_pieces(compress="snapkv", budget=0.1)
    few, many = (reserved_bytes(HUGE, config, n * HUGE.block_bytes) for n in (4_000, 100_000))
    assert many == extra_bytes(HUGE, config) > 4 * few


def test_ring_slots_of_a_look_ahead():
    """Llama 3.1 8B: 8 MiB each, so 128 fit in 1 GiB; all requests if outputs are bounded."""
    llama = Sizes(
        layers=32, heads=32, kv_heads=8, head_dim=128, itemsize=2, longest=131072, block_size=16,
        max_requests=256,
    )  # fmt: skip

    def slots(sizes=llama, **more):
        config = CompressionConfig.parse({"compress": "cake", **more})
        num_slots = ring_slots(sizes, config)
        window = 32 if "lookahead" in more else 8
        assert ring_bytes(sizes, config) == (num_slots and (num_slots + 1) * window * 2**18)
        return num_slots

    assert slots() == 0
    assert slots(lookahead=32) == 128
    assert slots(lookahead=32, lookahead_slots=200) == 200
    assert slots(lookahead=32, lookahead_slots=1000) == 256
    assert slots(replace(llama, max_requests=16), lookahead=32) == 16
    assert slots(decode_budget=512) == slots(decode_budget=512, lookahead=32) == 256


def test_scratch_pages_hold_one_layer_of_the_longest_sequence():
    raw_settings = {"compress": "cake", "packed_dtype": "k4v3", "budget": 1.0}
    plain = CompressionConfig.parse(raw_settings)
    reuse = CompressionConfig.parse({**raw_settings, "reuse": "grid"})
    assert scratch_blocks(SIZES, plain) == 0
    blocks = scratch_blocks(SIZES, reuse)
    assert (blocks - 1) * SIZES.layers * SIZES.block_size < SIZES.longest
    assert blocks * SIZES.layers * SIZES.block_size >= SIZES.longest
    extra = extra_bytes(SIZES, reuse) - extra_bytes(SIZES, plain)
    assert extra >= blocks * SIZES.block_bytes


@given(st.floats(0.001, 64), st.integers(1, 2**22))
def test_host_slots_take_no_more_than_their_memory(gibibytes, block_bytes):
    slot_bytes, limit = HOST_SLOT_BLOCKS * block_bytes, gibibytes * 2**30
    if slot_bytes > limit:
        with pytest.raises(ConfigError, match=r"at least one slot of 4 KV blocks.*raise --kv-park"):
            host_slots(gibibytes, block_bytes)
        return
    slots = host_slots(gibibytes, block_bytes)
    assert slots * slot_bytes <= limit < (slots + 1) * slot_bytes
    assert host_slots(None, block_bytes) == 0


def test_parking_reserves_its_staging_buffer():
    off = CompressionConfig.parse({"compress": "cake"})
    on = CompressionConfig.parse({"compress": "cake", "park": 1})
    assert extra_bytes(SIZES, on) - extra_bytes(SIZES, off) == 4 * SIZES.block_bytes
