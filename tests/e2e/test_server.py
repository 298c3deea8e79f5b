"""A server started as a user starts it, an ordinary OpenAI client, and vLLM's own /metrics."""

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from openai import BadRequestError, OpenAI

from first_layers import LAYERS, first_layers
from idling import wait_for
from streams import listen
from vllm_kvcompress.demo.ask import ask
from vllm_kvcompress.serving.process import ENVIRONMENT, serve
from vllm_kvcompress.serving.text import long_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FLAGS = [
    *("--enforce-eager", "--max-model-len", "6912", "--served-model-name", "demo"),
    # in bfloat16 a prompt that is found in the prefix cache rounds to another answer
    *("--dtype", "float32"),
    *("--kv-compress", "cake", "--kv-budget", "0.1", "--kv-min-prompt", "512"),
    *("--kv-compress-config", '{"log_requests": true}', "--kv-allow-override", "off"),
    # the pool holds a quarter of the longest prompt, beside its null block
    *("--kv-max-whole", "1664", "--kv-piece", "512", "--num-gpu-blocks-override", "14"),
    *("--kv-protect", "system"),
]
POOL = 13 * 128
NO_EOS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(demo_model, tmp_path_factory):
    model = first_layers(tmp_path_factory.mktemp("model"), demo_model)
    with serve(model, FLAGS, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)


@pytest.fixture(scope="module")
def text(demo_model):
    from transformers import AutoTokenizer

    return long_prompt(AutoTokenizer.from_pretrained(demo_model), 1500)


def test_chat(server, client, text):
    before = len(server.compressed())
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": text}], max_tokens=16, temperature=0
    )
    assert answer.usage.prompt_tokens > 1500
    assert answer.usage.completion_tokens <= 16
    assert answer.choices[0].message.content
    done = server.compressed()[before:]
    assert len(done) == 1
    assert done[0].prompt_tokens == answer.usage.prompt_tokens
    assert done[0].blocks_after < done[0].blocks_before / 3
    assert len(done[0].layer_tokens) == LAYERS
    assert len(set(done[0].layer_tokens)) > 1  # CAKE gives layers different shares


def test_without_kv_usage_a_compressed_answer_is_in_vllms_own_bytes(server, text):
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse

    sent = {"model": "demo", "prompt": text, "max_tokens": 4, "temperature": 0, **NO_EOS}
    before = len(server.compressed())
    answer = httpx.post(f"{server.url}/v1/completions", json=sent, timeout=300)
    parsed = CompletionResponse.model_validate_json(answer.content)
    assert len(server.compressed()) == before + 1
    assert parsed.model_dump_json().encode() == answer.content
    assert parsed.usage.prompt_tokens_details is None
    assert not parsed.model_extra
    assert not parsed.usage.model_extra
    sent |= {"stream": True, "stream_options": {"include_usage": True}}
    streamed = httpx.post(f"{server.url}/v1/completions", json=sent, timeout=300).text
    usage = json.loads(streamed.split("data: ")[-2])["usage"]
    assert usage == parsed.usage.model_dump(exclude_none=True)


def test_completion_and_streaming_agree(client, text):
    options = dict(model="demo", prompt=text, max_tokens=24, temperature=0, extra_body=NO_EOS)
    whole = client.completions.create(**options).choices[0].text
    pieces = [e.choices[0].text for e in client.completions.create(**options, stream=True)]
    assert len(pieces) > 5
    assert "".join(pieces) == whole


def test_two_clients_at_once(server, text):
    def ask(prompt: str) -> str:
        own = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
        done = own.completions.create(
            model="demo", prompt=prompt, max_tokens=12, temperature=0, extra_body=NO_EOS
        )
        return done.choices[0].text

    prompts = [text, text[: len(text) // 2] + " What is an expression?"]
    alone = [ask(prompt) for prompt in prompts]
    assert all(alone)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, prompts)) == alone


def test_a_short_prompt_is_left_whole(server, client):
    before = len(server.compressed())
    client.completions.create(model="demo", prompt="Hello", max_tokens=4, temperature=0)
    assert len(server.compressed()) == before


def test_metrics_show_the_memory_come_back(server, client, text):
    stream = client.completions.create(
        model="demo",
        prompt=text,
        max_tokens=192,  # the engine is still at it when the client comes to its 40th
        temperature=0,
        stream=True,
        extra_body=NO_EOS,
    )
    usage = []
    for number, _ in enumerate(stream):
        if number in (4, 20, 40):
            usage.append(server.metric("vllm:kv_cache_usage_perc"))
    total = server.metric("vllm:cache_config_info", "num_gpu_blocks") - 1
    held = [round(share * total) for share in usage]
    full = 1500 // 128
    assert 0 < max(held) <= full // 2
    assert server.metric("vllm:num_preemptions_total") == 0
    # the gauge follows the engine's next report
    wait_for(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)


def test_the_demo_times_a_prompt_that_is_computed_in_full(server, text):
    def hits() -> float:
        return server.metric("vllm:prefix_cache_hits_total")

    before = hits()
    first, again = (ask(server, text, tokens=96, salt=salt) for salt in ("one", "two"))
    assert hits() == before
    assert first.token_ids == again.token_ids
    assert len(first.token_ids) == 96  # many: most of them are to come when blocks are counted
    assert min(first.token_s, first.first_token_s) > 0
    assert first.compressed is not None
    assert first.compressed.prompt_tokens == first.prompt_tokens > 1500
    assert first.blocks == pytest.approx(first.compressed.blocks_after, abs=0.5)
    ask(server, text, tokens=2, salt="two")
    assert hits() > before  # what the salts of the others have kept from happening


def test_a_prompt_four_times_the_pool_is_answered(server, client, text, demo_model):
    """Packed piece by piece, whatever an ordinary client sends it by; `off` is refused."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    ids = tokenizer.encode(text * 6)[: 4 * POOL + 20]
    before = server.metric("vllm:kv_compress_packed_pieces_total")
    done = len(server.compressed())
    options = dict(model="demo", prompt=ids, max_tokens=8, temperature=0)
    answer = client.completions.create(**options, extra_body=NO_EOS)
    assert answer.usage.prompt_tokens == len(ids) > 4 * POOL
    assert answer.usage.completion_tokens == 8
    kept = server.compressed()[done]
    assert kept.prompt_tokens == len(ids)
    assert kept.blocks_before == -(-len(ids) // 128) > POOL // 128
    assert kept.blocks_after <= len(ids) // 10 // 128 + 2
    # 8 blocks leave room for a piece and its probe: the third of 13 boundaries finds more, then all
    # that follow it and the end
    assert server.metric("vllm:kv_compress_packed_pieces_total") == before + 12
    assert server.metric("vllm:num_preemptions_total") == 0
    for stream in (False, True):
        with pytest.raises(BadRequestError, match="it must stand whole") as refusal:
            client.completions.create(
                **options, stream=stream, extra_body={"vllm_xargs": {"kv_compress": "off"}}
            )
        assert "blocks of the KV cache, which has 13" in str(refusal.value)
    assert server.metric("vllm:kv_compress_refused_requests_total") == 2


def test_beams_of_a_chat_that_may_be_packed_unprotected_are_refused(client):
    """A server that packs piece by piece cannot protect them; completions have no system prompt."""
    beams = {"use_beam_search": True, "ignore_eos": True}
    system = {"role": "system", "content": "Never say orange."}
    common = {"model": "demo", "max_tokens": 2, "n": 2, "extra_body": beams}
    with pytest.raises(BadRequestError, match="send it without use_beam_search"):
        client.chat.completions.create(
            messages=[system, {"role": "user", "content": "Hello"}], **common
        )
    done = client.completions.create(prompt="Hello", **common)
    assert len(done.choices) == 2


def test_an_oversize_prompt_is_a_400_and_the_server_lives_on(client, text):
    with pytest.raises(BadRequestError):
        client.completions.create(model="demo", prompt=text * 6, max_tokens=4)
    assert client.completions.create(model="demo", prompt="Hello", max_tokens=2).choices


def test_a_killed_engine_is_an_error_for_everyone_at_once(server, text):
    """The last test on this server. In the middle of compressions: each client hears of it, and
    the server ends.
    """
    before = server.metric("vllm:kv_compress_requests_total")
    root = psutil.Process(server.process.pid)
    engine = next(p for p in root.children(recursive=True) if "EngineCore" in " ".join(p.cmdline()))
    half = text[: len(text) // 2]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        ends = [pool.submit(listen, server, f"{i} {half}", 1000) for i in range(6)]
        wait_for(lambda: server.metric("vllm:kv_compress_requests_total") >= before + 2)
        engine.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        reasons = [end.result(timeout=300) for end in ends]
        heard_s = time.monotonic() - killed
    assert server.process.wait(300) is not None
    print(f"all clients knew after {heard_s:.1f} s: {sorted(set(reasons))}")  # noqa: T201
    assert not {"length", "stop"} & set(reasons), reasons


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-compress", "caek"], "did you mean 'cake'"),
        (["--kv-compress", "cake", "--pipeline-parallel-size", "4"], "must hold as many layers"),
    ],
)
def test_a_wrong_flag_ends_the_command_before_anything_loads(demo_model, flags, message):
    """By vLLM's parser, and by what reads the model; test_command_line types all of them."""
    vllm = str(Path(sys.executable).with_name("vllm"))
    done = subprocess.run(
        [vllm, "serve", demo_model, *flags],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )
    assert done.returncode == 2
    last = [line for line in done.stderr.splitlines() if line.strip()][-1]
    assert message in last
    assert not re.search("Loading|load_model|Traceback", done.stdout + done.stderr)
