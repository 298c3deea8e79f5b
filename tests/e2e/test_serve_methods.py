"""A server with a custom method and D2O, whose statistics cover all prompt tokens."""

import json

import pytest
from openai import OpenAI

from checkpoints import text_checkpoint
from forks import serve_forking
from vllm_kvcompress.serving.text import long_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MIXED = {"allocator": "cake", "scorer": "caote", "base": "snapkv", "selector": "chunks"}
FLAGS = [
    "--enforce-eager",
    "--max-model-len",
    "4096",
    "--served-model-name",
    "demo",
    "--dtype",
    "float32",
    # Small blocks, because filled blocks of 128 tokens give layers of random weights equal shares.
    "--block-size",
    "32",
    "--num-gpu-blocks-override",
    "257",
    "--kv-budget",
    "0.3",
    "--kv-compress",
    "custom",
    "--kv-allow-override",
    "d2o",
    "--kv-compress-config",
    json.dumps({**MIXED, "log_requests": True}),
]


@pytest.fixture(scope="module")
def server(demo_model, tmp_path_factory):
    model = text_checkpoint(tmp_path_factory.mktemp("model"), demo_model)
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
