"""Kernel launches and temporary memory of one packing, counted without a GPU."""

import os

import pytest

from benchmarks.dummy_prompts import Shape, count_launches
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.planning.memory import Sizes, extra_bytes, ring_bytes, table_bytes
from vllm_kvcompress.settings.config import CompressionConfig

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ, reason="the tests only count kernel launches"
)

CEILINGS = {
    "cake": 28,
    "cake-chunk": 45,
    "cake-chunk in k4v3": 51,
    "caote": 31,
    "chunkkv": 20,
    "d2o": 57,
    "defensivekv": 31,
    "dynamickv": 43,
    "fastcaote": 31,
    "h2o": 16,
    "keydiff": 18,
    "lagkv": 29,
    "layer-defensivekv": 47,
    "pyramidkv": 22,
    "random": 14,
    "snapkv": 22,
    "streamingllm": 17,
    "tova": 24,
}
"""Maximum launches of one packing (torch's and ours) by preset.

Before layers were batched, 32 layers took 512 with cake and 804 with cake-chunk.
"""
PACKED = {"cake-chunk in k4v3": {"compress": "cake-chunk", "packed_dtype": "k4v3"}}
CASES = {**{name: {"compress": name} for name in sorted(PRESETS)}, **PACKED}


@pytest.mark.parametrize("case", CASES)
def test_launches_do_not_grow_with_the_layers(case):
    """All layers share a launch if they fit into memory, as 64 layers of 2,048 tokens do."""
    options = {**CASES[case], "budget": 0.2}
    few, many, more = (
        count_launches(options, Shape(layers=layers, tokens=2048)) for layers in (4, 32, 64)
    )
    assert few.total == many.total == more.total <= CEILINGS[case], (few, many, more)
    assert many.triton.total() >= 2  # selecting and moving


def reserved_bytes(options, shape):
    """Return the bytes that the engine sets aside for a packing's temporary tensors."""
    settings = CompressionConfig.parse(options)
    sizes = Sizes(
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        itemsize=2,
        longest=shape.max_tokens,
        block_size=shape.block_size,
        max_requests=shape.requests,
    )
    lasting = ring_bytes(sizes, settings) + table_bytes(sizes, settings)
    return extra_bytes(sizes, settings) - lasting


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [8192, 131072])
def test_temporary_tensors_fit_into_the_reserved_memory(case, tokens):
    options, shape = {**CASES[case], "budget": 0.2}, Shape(layers=32, tokens=tokens - 64)
    assert count_launches(options, shape).peak_bytes <= reserved_bytes(options, shape)


@pytest.mark.parametrize("case", ["cake-chunk", "cake-chunk in k4v3", "snapkv", "cake"])
@pytest.mark.parametrize(("tokens", "requests"), [(1030, 96), (8100, 12)])
def test_prompts_that_end_together_fit_into_the_reserved_memory(case, tokens, requests):
    options = {**CASES[case], "budget": 0.2}
    shape = Shape(layers=32, tokens=tokens, requests=requests)
    assert count_launches(options, shape).peak_bytes <= reserved_bytes(options, shape)


_BUDGET = {"_apportion_kernel": 1, "_pages_kernel": 1, "mul": 1}
PER_PROMPT = {
    "cake": _BUDGET,
    # A prompt that ends its look-ahead gives its slot in the query ring back.
    "cake-chunk": {**_BUDGET, "fill_": 1},
    "cake-chunk in k4v3": {**_BUDGET, "fill_": 1, "clamp": 1},
    "snapkv": {"mul": 1},
}
"""Launches that a further prompt adds to a packing."""


@pytest.mark.parametrize("case", PER_PROMPT)
def test_prompts_that_end_together_share_launches(case):
    """Each prompt adds only the launches of its budget."""
    options = {**CASES[case], "budget": 0.2}
    two, four = (
        count_launches(options, Shape(layers=4, tokens=2048, requests=number)) for number in (2, 4)
    )
    more = (four.torch + four.triton) - (two.torch + two.triton)
    assert more == {name: 2 * count for name, count in PER_PROMPT[case].items()}
    assert four.triton["columns_kernel"] == two.triton["columns_kernel"] > 0
    assert four.triton["_select_kernel"] + four.triton["_select_chunks_kernel"] == 1


def test_methods_that_need_the_whole_prompt_pack_prompts_one_by_one():
    options = {"compress": "dynamickv", "budget": 0.2}
    shape = Shape(layers=4, tokens=2048, requests=2)
    assert count_launches(options, shape).triton["_select_kernel"] == 2
