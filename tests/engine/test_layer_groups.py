"""How layers are grouped, against vLLM's own grouping of the specs that its workers get from us."""

import logging

import torch
from hypothesis import given
from hypothesis import settings as prop
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from vllm_kvcompress.engine.scheduling.cache_spec import CompressedSpec, compressed_specs
from vllm_kvcompress.planning.layer_groups import FULL, WINDOWED, layer_groups, layer_types
from vllm_kvcompress.settings.config import CompressionConfig

try:
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
except ImportError:  # since 0.33
    from vllm.v1.core.kv_cache_planning import _get_kv_cache_groups_uniform_page_size

SHAPE = dict(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
CAKE = CompressionConfig.parse({"compress": "cake"})


@prop(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.sampled_from([*sorted(FULL), WINDOWED]), min_size=1, max_size=40))
def test_groups_are_vllms(types):
    logging.getLogger("vllm").setLevel(logging.ERROR)
    own = layer_groups(types, len(types), 128)
    specs = {
        str(layer): SlidingWindowSpec(**SHAPE, sliding_window=128)
        if kind == WINDOWED
        else FullAttentionSpec(**SHAPE)
        for layer, kind in enumerate(types)
    }
    if not own.full:
        return
    made = compressed_specs(specs, CAKE)
    groups = _get_kv_cache_groups_uniform_page_size(made)
    full = [group for group in groups if isinstance(group.kv_cache_spec, CompressedSpec)]
    assert len(full) == own.full_groups
    assert len(groups) - len(full) == own.windowed_groups
    assert max(len(group.layer_names) for group in groups) <= own.size
    assert sorted(int(name) for group in full for name in group.layer_names) == list(own.full)


@prop(derandomize=True, deadline=None, max_examples=200)
@given(
    window=st.integers(1, 5000),
    in_flight=st.integers(1, 9000),
    longest=st.integers(1, 9000),
)
def test_blocks_of_a_window_are_vllms_and_never_more_than_the_prompts(window, in_flight, longest):
    spec = SlidingWindowSpec(**SHAPE, sliding_window=window)
    own = layer_groups(["attention", WINDOWED, WINDOWED], 3, window)
    theirs = spec.max_admission_blocks_per_request(
        max_in_flight_tokens=in_flight, max_model_len=longest
    )
    assert own.windowed_groups == 2
    assert own.windowed_blocks(longest, in_flight, 16) == 2 * min(theirs, -(-longest // 16))


def test_names_that_a_config_leaves_out():
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 7}
    every = [WINDOWED] * 5 + ["full_attention", WINDOWED]
    assert layer_types(gemma) == tuple(every)
    assert layer_types({**gemma, "sliding_window_pattern": 2})[:2] == (WINDOWED, "full_attention")
    assert layer_types({**gemma, "layer_types": ["attention"]}) == ("attention",)
    assert layer_types({"model_type": "gpt_oss", "num_hidden_layers": 2}) == (
        WINDOWED,
        "full_attention",
    )
    assert layer_types({"model_type": "olmo3", "num_hidden_layers": 2}) == (
        "full_attention",
        "unknown",
    )
    assert layer_types({"model_type": "llama"}) == ()


def test_windows_that_are_switched_off_are_none():
    own = layer_groups([WINDOWED, "full_attention"], 2, None)
    assert (own.full, own.windowed, own.windowed_groups, own.size) == ((0, 1), 0, 0, 2)
    assert own.windowed_blocks(1000, 100, 16) == 0
