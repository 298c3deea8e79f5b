"""The memory that compression takes covers whatever a request may ask for."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.methods.presets import PRESETS
from vllm_kvcompress.planning.memory import (
    Sizes,
    bytes_beside,
    extra_bytes,
    ring_bytes,
    ring_slots,
    table_bytes,
    table_columns,
)
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import settings_for

SIZES = Sizes(
    layers=4, heads=8, kv_heads=2, head_dim=64, itemsize=2, longest=4099, block_size=16,
    max_requests=8,
)  # fmt: skip
METHODS = st.sampled_from(sorted(PRESETS))
BUDGETS = st.sampled_from([0.05, 0.2, 0.5, 0.9, 1.0, 64, 700, 4000, 5000])
BOUNDS = st.sampled_from(["", "0.05:0.3", "64:900", "0.1:0.4,100:2000"])


@st.composite
def engines(draw):
    """Settings of an engine; None where they contradict each other."""
    given = {"compress": draw(METHODS | st.just("off")), "budget": draw(BUDGETS)}
    if draw(st.booleans()):
        methods = draw(st.lists(METHODS, min_size=1, max_size=3))
        given |= {"allow_override": methods}
        if bounds := draw(BOUNDS):
            given |= {"budget_bounds": bounds}
    aliases = draw(st.dictionaries(st.sampled_from("ab"), st.tuples(METHODS, BUDGETS), max_size=2))
    given |= {"alias": {name: f"{method}:{budget}" for name, (method, budget) in aliases.items()}}
    try:
        engine = CompressionConfig.parse(given)
    except ConfigError:
        return None
    return engine if engine.active else None


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    engines(),
    st.fixed_dictionaries(
        {},
        optional={
            "kv_compress": METHODS,
            "kv_budget": BUDGETS | st.floats(0.01, 0.999),
            "kv_alias": st.sampled_from("ab"),
        },
    ),
)
def test_no_request_takes_more_than_was_set_aside(engine, asked):
    if engine is None:
        return
    try:
        own = settings_for(engine, asked)
    except OverrideError:
        return
    if own is not None:
        assert extra_bytes(SIZES, own) <= extra_bytes(SIZES, engine)


@pytest.mark.parametrize(
    ("engine", "requests"),
    [
        ({"compress": "off", "alias": "a=d2o:0.05"}, [{"kv_alias": "a"}]),
        ({"compress": "off", "budget": 0.9, "alias": "a=d2o:0.05"}, [{"kv_alias": "a"}]),
        ({"compress": "snapkv", "budget": 0.9, "alias": "a=d2o:0.05"}, [{}, {"kv_alias": "a"}]),
        (
            {"compress": "off", "allow_override": "tova", "budget_bounds": "16:64", "budget": 64}
            | {"alias": "a=d2o:0.05"},
            [{"kv_compress": "tova"}, {"kv_alias": "a"}, {"kv_alias": "a", "kv_budget": 64}],
        ),
    ],
)
def test_nothing_is_set_aside_that_no_request_can_take(engine, requests):
    """But for one method's window beside another's scores: what each takes is added up."""
    engine = CompressionConfig.parse(engine)
    most = max(extra_bytes(SIZES, settings_for(engine, asked)) for asked in requests)
    assert most <= extra_bytes(SIZES, engine) <= 1.01 * most


def test_an_aliass_budget_counts_for_a_method_that_is_asked_for_under_it():
    """Bounds do not bind an alias, and d2o stages more than snapkv does."""
    engine = CompressionConfig.parse(
        {"compress": "snapkv", "budget": 0.1, "allow_override": "d2o", "budget_bounds": "0.1:0.2"}
        | {"alias": {"most": "snapkv:0.9"}}
    )
    own = settings_for(engine, {"kv_alias": "most", "kv_compress": "d2o"})
    assert (own.compress, own.budget) == ("d2o", 0.9)
    assert extra_bytes(SIZES, own) <= extra_bytes(SIZES, engine)


@pytest.mark.parametrize("aggregate", ["max", "defensive"])
def test_a_maximum_is_one_map_more(aggregate):
    plain, more = (
        CompressionConfig.parse({"compress": "snapkv", "budget": 0.2, "scorer_params": params})
        for params in ({}, {"aggregate": aggregate})
    )
    one_map = SIZES.heads * SIZES.longest * 4
    assert extra_bytes(SIZES, more) - extra_bytes(SIZES, plain) == one_map


def longer_than_the_pool(**given):
    given = {"max_whole": 2048, "piece": 1024, **given}
    return CompressionConfig.parse({key: value for key, value in given.items() if value})


HUGE = Sizes(
    layers=32, heads=32, kv_heads=8, head_dim=128, itemsize=2, longest=1_000_000, block_size=16,
    max_requests=256,
)  # fmt: skip
WHOLE = 62_512
"""Blocks of the longest sequence, in rows of 64 bytes."""


@pytest.mark.parametrize(
    ("given", "blocks", "columns"),
    [
        # layers share evenly: what a request holds in all is what each of them reads
        ({"compress": "snapkv", "budget": 0.1}, 15_000, 15_008),
        ({"compress": "chunkkv", "budget": 1024}, 2_000, 2_000),
        # 64 blocks are kept of 1,024 tokens, of which one layer may have all but the others' own
        ({"compress": "cake", "budget": 1024}, 2_000, 4_016),
        ({"compress": "cake", "budget": 1024, "decode_budget": 2048}, 2_000, 2_000 + 128 * 31),
        # a tenth of a million tokens, and one layer might have it all
        ({"compress": "cake", "budget": 0.1}, 15_000, WHOLE),
        ({"compress": "snapkv", "budget": 0.1, "allow_override": "cake"}, 15_000, WHOLE),
        # as wide as the longest sequence, and never wider
        ({"compress": "snapkv", "budget": 0.1}, 100_000, WHOLE),
        ({"compress": "snapkv", "budget": 0.1}, None, WHOLE),
        ({"compress": "snapkv", "budget": 0.1, "max_whole": None, "piece": None}, 15_000, WHOLE),
    ],
)
def test_tables_follow_the_pool_where_sequences_may_be_longer(given, blocks, columns):
    own = longer_than_the_pool(**given)
    assert table_columns(HUGE, own, blocks) == columns
    taken = 32 * 4 * columns * (2 * 256 + 1)
    assert taken <= table_bytes(HUGE, own, blocks) <= 1.01 * taken


def test_what_a_layer_cannot_hold_is_not_set_aside():
    own = longer_than_the_pool(compress="snapkv", budget=0.1)
    more = [bytes_beside(HUGE, own, blocks * HUGE.block_bytes) for blocks in (4_000, 100_000)]
    assert more[1] == extra_bytes(HUGE, own) > 4 * more[0]


def test_slots_for_the_queries_of_a_look_ahead():
    """Llama 3.1 8B: 8 MiB each, so 128 of them in 1 GiB; all requests where answers are bounded."""
    llama = Sizes(
        layers=32, heads=32, kv_heads=8, head_dim=128, itemsize=2, longest=131072, block_size=16,
        max_requests=256,
    )  # fmt: skip

    def slots(sizes=llama, **more):
        own = CompressionConfig.parse({"compress": "cake", **more})
        found = ring_slots(sizes, own)
        window = 32 if "lookahead" in more else 8
        assert ring_bytes(sizes, own) == (found and (found + 1) * window * 2**18)
        return found

    assert slots() == 0
    assert slots(lookahead=32) == 128
    assert slots(lookahead=32, lookahead_slots=200) == 200
    assert slots(lookahead=32, lookahead_slots=1000) == 256
    assert slots(replace(llama, max_requests=16), lookahead=32) == 16
    assert slots(decode_budget=512) == slots(decode_budget=512, lookahead=32) == 256
