"""Methods as users type them: one server each, with the statistics that need every token."""

import json

import pytest
from openai import OpenAI

from vllm_kvcompress.demo.server import serve
from vllm_kvcompress.demo.text import long_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MIXED = {"allocator": "cake", "scorer": "caote", "base": "snapkv", "selector": "chunks"}


@pytest.mark.parametrize("settings", [{"compress": "d2o"}, MIXED], ids=["d2o", "mixed"])
def test_a_method_serves(settings, demo_model, tmp_path):
    from transformers import AutoTokenizer

    text = long_prompt(AutoTokenizer.from_pretrained(demo_model), 1500)
    flags = ["--enforce-eager", "--max-model-len", "4096", "--served-model-name", "demo"]
    flags += ["--kv-budget", "0.3", "--kv-compress", settings.get("compress", "custom")]
    flags += ["--kv-compress-config", json.dumps({**settings, "log_requests": True})]
    with serve(demo_model, flags, tmp_path / "log") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
        answers = [
            client.completions.create(
                model="demo",
                prompt=text,
                max_tokens=8,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            for _ in range(2)
        ]
        done = server.compressed()
    assert [answer.usage.completion_tokens for answer in answers] == [8, 8]
    assert len(done) == 2  # cold, and warm from the prefix cache where the method can
    for prompt in done:
        assert prompt.kept_tokens == pytest.approx(0.3 * prompt.prompt_tokens, abs=128)
        assert len(set(prompt.layer_tokens)) > 1
