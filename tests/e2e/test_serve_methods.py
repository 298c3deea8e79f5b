"""A server with a custom method, with D2O, whose statistics cover all prompt tokens, and k4v3."""

import json
import shlex

import pytest
from openai import OpenAI

from endpoint_requests import compression_report
from first_layers import LAYERS, first_layers
from forks import serve_forking
from long_text import long_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MIXED = {
    "allocator": "cake",
    "scorer": "caote",
    "scorer_params": {"base": "snapkv"},
    "selector": "chunks",
}
# Small blocks, because filled blocks of 128 tokens give layers of random weights equal shares.
FLAGS = [
    *shlex.split("""
        --enforce-eager --max-model-len 4096 --served-model-name demo --dtype float32
        --block-size 32 --num-gpu-blocks-override 257 --kv-budget 0.3 --kv-compress custom
        --kv-allow-override off,d2o,snapkv
    """),
    "--kv-compress-config",
    json.dumps({**MIXED, "log_requests": True}),
    "--kv-alias",
    "demo@packed=snapkv:1.0:k4v3",
    "--kv-usage",
]


@pytest.fixture(scope="module")
def server(demo_model, tmp_path_factory):
    model = first_layers(tmp_path_factory.mktemp("model"), demo_model)
    with serve_forking(model, FLAGS, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.mark.parametrize("extra_args", [{}, {"kv_compress": "d2o"}], ids=["mixed", "d2o"])
def test_a_method_compresses_requests_of_a_server(extra_args, server, demo_model):
    from transformers import AutoTokenizer

    text = long_prompt(AutoTokenizer.from_pretrained(demo_model), 1500)
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
    before = len(server.compressed())
    responses = [
        client.completions.create(
            model="demo",
            prompt=text,
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True, "vllm_xargs": extra_args},
        )
        for _ in range(2)
    ]
    compressed = server.compressed()[before:]
    assert [response.usage.completion_tokens for response in responses] == [8, 8]
    assert (
        len(compressed) == 2
    )  # once cold, and once with prefix-cache hits if the method supports them
    for prompt in compressed:
        assert prompt.kept_tokens == pytest.approx(0.3 * prompt.prompt_tokens, abs=128)
        assert len(set(prompt.layer_tokens)) > 1


def test_packing_every_token_returns_all_blocks_of_whole_pages_but_one_per_page(server, demo_model):
    """By alias and by request. The full cache's output differs in few tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    ids, block = tokenizer.encode(long_prompt(tokenizer, 1500)), 32
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)

    def net_freed_blocks():
        freed, packed = (
            server.metric(f"vllm:kv_compress_{name}_blocks_total") for name in ("freed", "packed")
        )
        return freed - packed

    def complete(model, **extra_args):
        before = net_freed_blocks()
        response = client.completions.create(
            model=model,
            prompt=ids,
            max_tokens=48,
            temperature=0,
            extra_body={"ignore_eos": True, "vllm_xargs": extra_args, "return_token_ids": True},
        )
        freed = net_freed_blocks() - before
        return response.choices[0].token_ids, freed, compression_report(response.model_dump())

    full, freed, usage = complete("demo", kv_compress="off")
    assert (freed, usage) == (0, None)
    blocks = len(ids) // block
    packed = complete("demo@packed")
    assert packed == complete("demo", kv_compress="snapkv", kv_budget=1.0, kv_packed_dtype="k4v3")
    output, freed, usage = packed
    # in a float32 cache, a page holds 8 blocks' tokens; the first block stays ordinary
    pages = (blocks - 1) // 8
    assert pages > 4
    assert freed == 7 * pages
    assert usage["packed_dtype"] == "k4v3"
    assert usage["kept_tokens"] == len(ids)
    # keys and values of 3 heads of 64 numbers in float32, in pages and in ordinary blocks
    block_bytes = block * 2 * 3 * 64 * 4 * LAYERS
    assert usage["kept_bytes"] == (-(-len(ids) // block) - freed) * block_bytes
    assert sum(a == b for a, b in zip(full, output, strict=True)) >= 0.8 * len(full)
