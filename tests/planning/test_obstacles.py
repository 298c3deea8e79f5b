"""Reasons why kept tokens cannot be packed in k4v3."""

import pytest

from vllm_kvcompress.planning.obstacles import packed_cache_refusal, packed_shape_refusal
from vllm_kvcompress.settings.config import CompressionConfig

CAKE = CompressionConfig.parse({"compress": "cake"})
K4V3 = CompressionConfig.parse({"compress": "cake", "packed_dtype": "k4v3"})
ALIAS = CompressionConfig.parse({"compress": "off", "alias": "small=cake:0.4:k4v3"})


@pytest.mark.parametrize("settings", [K4V3, ALIAS])
@pytest.mark.parametrize("cache", ["fp8", "fp8_e4m3"])
def test_k4v3_needs_a_cache_in_the_models_dtype(settings, cache):
    reason = packed_cache_refusal(settings, cache, "--kv-cache-dtype auto")
    assert f"cannot be combined with a {cache} KV cache" in reason
    assert "set --kv-cache-dtype auto, or set packed_dtype to auto" in reason
    assert packed_cache_refusal(settings, "auto", "") is None
    assert packed_cache_refusal(settings, None, "") is None
    assert packed_cache_refusal(CAKE, cache, "") is None


@pytest.mark.parametrize("settings", [K4V3, ALIAS])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "itemsize", "words"),
    [
        (32, 16, 2, ("at least 64", "this model has 32; set packed_dtype to auto")),
        (100, None, 4, ("multiple of 8", "this model has 100")),
        (128, 24, 2, ("a multiple of 16", "got blocks of 24; set --block-size 16, or")),
        (128, 8, 2, ("a multiple of 16", "got blocks of 8; set --block-size 16, or")),
        (64, 12, 4, ("a multiple of 8", "got blocks of 12; set --block-size 8, or")),
    ],
)
def test_k4v3_needs_pages_that_hold_whole_groups(settings, head_dim, block_size, itemsize, words):
    reason = packed_shape_refusal(settings, head_dim, block_size, itemsize)
    assert all(word in reason for word in words), reason
    assert packed_shape_refusal(CAKE, head_dim, block_size, itemsize) is None


@pytest.mark.parametrize(
    ("head_dim", "block_size", "itemsize"),
    [(64, 16, 2), (80, 128, 2), (128, 528, 2), (256, None, 2), (64, 8, 4)],
)
def test_other_pages_hold_whole_groups(head_dim, block_size, itemsize):
    assert packed_shape_refusal(K4V3, head_dim, block_size, itemsize) is None
