"""Our layer groups against vLLM's grouping of the KV cache specs that our workers return."""

import logging

import torch
from hypothesis import given
from hypothesis import settings as prop
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from vllm_kvcompress.engine.messages.cache_spec import CompressedSpec, compressed_specs
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
def test_layer_groups_match_vllm(types):
    logging.getLogger("vllm").setLevel(logging.ERROR)
    groups = layer_groups(types, len(types), 128)
    specs = {
        str(layer): SlidingWindowSpec(**SHAPE, sliding_window=128)
        if kind == WINDOWED
        else FullAttentionSpec(**SHAPE)
        for layer, kind in enumerate(types)
    }
    if not groups.full:
        return
    compressed = compressed_specs(specs, CAKE)
    vllm_groups = _get_kv_cache_groups_uniform_page_size(compressed)
    full = [group for group in vllm_groups if isinstance(group.kv_cache_spec, CompressedSpec)]
    assert len(full) == groups.full_groups
    assert len(vllm_groups) - len(full) == groups.windowed_groups
    assert max(len(group.layer_names) for group in vllm_groups) <= groups.size
    assert sorted(int(name) for group in full for name in group.layer_names) == list(groups.full)


@prop(derandomize=True, deadline=None, max_examples=200)
@given(
    window=st.integers(1, 5000),
    in_flight=st.integers(1, 9000),
    longest=st.integers(1, 9000),
)
def test_windowed_blocks_match_vllm_up_to_the_prompts_blocks(window, in_flight, longest):
    spec = SlidingWindowSpec(**SHAPE, sliding_window=window)
    groups = layer_groups(["attention", WINDOWED, WINDOWED], 3, window)
    vllm_blocks = spec.max_admission_blocks_per_request(
        max_in_flight_tokens=in_flight, max_model_len=longest
    )
    assert groups.windowed_groups == 2
    assert groups.windowed_blocks(longest, in_flight, 16) == 2 * min(vllm_blocks, -(-longest // 16))


def test_layer_types_are_inferred_from_the_model_type():
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 7}
    expected = [WINDOWED] * 5 + ["full_attention", WINDOWED]
    assert layer_types(gemma) == tuple(expected)
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


def test_disabled_windows_count_as_full_attention():
    groups = layer_groups([WINDOWED, "full_attention"], 2, None)
    assert (groups.full, groups.windowed, groups.windowed_groups, groups.size) == ((0, 1), 0, 0, 2)
    assert groups.windowed_blocks(1000, 100, 16) == 0
