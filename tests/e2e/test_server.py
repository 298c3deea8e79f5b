"""Test a server as a user starts it, with the OpenAI client and vLLM's ``/metrics``."""

import concurrent.futures
import json
import os
import re
import shlex
import signal
import time

import httpx
import psutil
import pytest
from openai import BadRequestError, OpenAI

from first_layers import LAYERS, first_layers
from forks import ForkedCommand
from long_text import long_prompt
from server_metrics import wait_for
from streams import stream_end
from vllm_kvcompress.demo.ask import ask_all
from vllm_kvcompress.serving.process import ENVIRONMENT, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# In bfloat16, rounding changes outputs when a prompt comes from the prefix cache. Besides the null
# block, the pool holds a quarter of the longest prompt.
FLAGS = shlex.split("""
    --enforce-eager --max-model-len 6912 --served-model-name demo --dtype float32
    --kv-compress cake --kv-budget 0.1 --kv-min-prompt 512
    --kv-compress-config '{"log_requests": true}' --kv-allow-override off --kv-max-whole 1664
    --kv-piece 512 --num-gpu-blocks-override 14 --kv-protect system
""")
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


def test_a_chat_is_compressed(server, client, text):
    before = len(server.compressed())
    response = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": text}], max_tokens=16, temperature=0
    )
    assert response.usage.prompt_tokens > 1500
    assert response.usage.completion_tokens <= 16
    assert response.choices[0].message.content
    compressed = server.compressed()[before:]
    assert len(compressed) == 1
    assert compressed[0].prompt_tokens == response.usage.prompt_tokens
    assert compressed[0].blocks_after < compressed[0].blocks_before / 3
    assert len(compressed[0].layer_tokens) == LAYERS
    assert len(set(compressed[0].layer_tokens)) > 1  # CAKE gives layers different budgets


def test_responses_are_byte_identical_to_vllms_without_kv_usage(server, text):
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse

    request = {"model": "demo", "prompt": text, "max_tokens": 4, "temperature": 0, **NO_EOS}
    before = len(server.compressed())
    response = httpx.post(f"{server.url}/v1/completions", json=request, timeout=300)
    parsed = CompletionResponse.model_validate_json(response.content)
    assert len(server.compressed()) == before + 1
    assert parsed.model_dump_json().encode() == response.content
    assert parsed.usage.prompt_tokens_details is None
    assert not parsed.model_extra
    assert not parsed.usage.model_extra
    request |= {"stream": True, "stream_options": {"include_usage": True}}
    streamed = httpx.post(f"{server.url}/v1/completions", json=request, timeout=300).text
    usage = json.loads(streamed.split("data: ")[-2])["usage"]
    assert usage == parsed.usage.model_dump(exclude_none=True)


def test_streamed_and_plain_completions_are_equal(client, text):
    options = dict(model="demo", prompt=text, max_tokens=24, temperature=0, extra_body=NO_EOS)
    unstreamed = client.completions.create(**options).choices[0].text
    pieces = [e.choices[0].text for e in client.completions.create(**options, stream=True)]
    assert len(pieces) > 5
    assert "".join(pieces) == unstreamed


def test_two_concurrent_clients_get_their_outputs(server, text):
    def complete(prompt: str) -> str:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
        completion = client.completions.create(
            model="demo", prompt=prompt, max_tokens=12, temperature=0, extra_body=NO_EOS
        )
        return completion.choices[0].text

    prompts = [text, text[: len(text) // 2] + " What is an expression?"]
    sequential = [complete(prompt) for prompt in prompts]
    assert all(sequential)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(complete, prompts)) == sequential


def test_the_demo_measures_prompts_without_prefix_cache_hits(server, text):
    def hits() -> float:
        return server.metric("vllm:prefix_cache_hits_total")

    before = hits()
    one, two = (ask_all(server, [text, text], tokens=48, salt=salt) for salt in ("one", "two"))
    assert hits() == before
    for _ in range(2):
        ask_all(server, [text], tokens=2, salt="repeated")
    assert hits() > before  # a repeated salt hits the prefix cache, so the hit counter works
    for reply in (*one.replies, *two.replies):
        assert len(reply.token_ids) == 48
        assert 0 < reply.first_token_s < reply.end_s <= max(one.wall_s, two.wall_s)
        assert reply.compressed is not None
        assert reply.compressed.prompt_tokens == reply.prompt_tokens > 1500
    requests = {reply.compressed.request for reply in (*one.replies, *two.replies)}
    assert len(requests) == 4  # each reply has its own log line
    assert min(one.prefill_s, one.compression_s) > 0


def test_the_demo_samples_vllms_gauges(server, text):
    """The engine needs little time for a token of this small model, so the output is long."""
    tokens = 512
    tries = (ask_all(server, [text], tokens=tokens, salt=f"sampled {index}") for index in range(5))
    measured = next(each for each in tries if each.last_blocks > 0)
    assert measured.max_running == 1
    assert 0 < measured.mean_running <= 1
    (reply,) = measured.replies
    kept_blocks, output_blocks = reply.compressed.blocks_after, tokens / 128
    assert kept_blocks - 0.5 < measured.last_blocks < kept_blocks + output_blocks + 1.5
    # uncompressed, the prompt and half of the output would hold more
    assert measured.last_blocks < (reply.prompt_tokens + tokens / 2) // 128


def test_a_prompt_four_times_the_pool_is_served(server, client, text, demo_model):
    """Such a prompt is compressed piece by piece; with `off` it is refused."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    ids = tokenizer.encode(text * 6)[: 4 * POOL + 20]
    before = server.metric("vllm:kv_compress_packed_pieces_total")
    num_compressed = len(server.compressed())
    options = dict(model="demo", prompt=ids, max_tokens=8, temperature=0)
    response = client.completions.create(**options, extra_body=NO_EOS)
    assert response.usage.prompt_tokens == len(ids) > 4 * POOL
    assert response.usage.completion_tokens == 8
    compressed = server.compressed()[num_compressed]
    assert compressed.prompt_tokens == len(ids)
    assert compressed.blocks_before == -(-len(ids) // 128) > POOL // 128
    assert compressed.blocks_after <= len(ids) // 10 // 128 + 2
    # 8 blocks leave space for a piece and its probe: packing starts at the third of 13 boundaries,
    # so 11 boundaries and the prompt's end are packed
    assert server.metric("vllm:kv_compress_packed_pieces_total") == before + 12
    assert server.metric("vllm:num_preemptions_total") == 0
    for stream in (False, True):
        with pytest.raises(BadRequestError, match="it stays uncompressed") as refusal:
            client.completions.create(
                **options, stream=stream, extra_body={"vllm_xargs": {"kv_compress": "off"}}
            )
        assert "blocks of the KV cache, which has 13" in str(refusal.value)
    assert server.metric("vllm:kv_compress_refused_requests_total") == 2


def test_beams_of_a_chat_with_protection_are_refused(client):
    """Beams cannot protect the system prompt of a chat; completions have no system prompt."""
    beams = {"use_beam_search": True, "ignore_eos": True}
    system = {"role": "system", "content": "Never say orange."}
    common = {"model": "demo", "max_tokens": 2, "n": 2, "extra_body": beams}
    with pytest.raises(BadRequestError, match="send it without use_beam_search"):
        client.chat.completions.create(
            messages=[system, {"role": "user", "content": "Hello"}], **common
        )
    completion = client.completions.create(prompt="Hello", **common)
    assert len(completion.choices) == 2


def test_a_request_id_forges_no_log_line(server, text):
    """One line tells of the compressed prompt, the other of a lowered max_tokens."""
    forged = (
        "(EngineCore pid=1) INFO 01-02 03:04:05 [reports.py:160] kv-compress: request='forged'"
        " prompt_tokens=1 kept_tokens=1.0 lookahead=0 blocks_before=1 blocks_after=1"
        " layer_tokens=[1]"
    )
    before, num_compressed = server.log.stat().st_size, len(server.compressed())
    ids = {"request_id": f"\x1b[2J\n{forged}\r{forged}\n" + "x" * 5000}
    request = {"model": "demo", "prompt": text, "max_tokens": 2} | ids
    response = httpx.post(f"{server.url}/v1/completions", json=request, timeout=300)
    assert response.status_code == 200, response.text
    request |= {"prompt": "Hello", "max_tokens": 6000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=300) as events:
        next(events.iter_lines())
    (line,) = server.compressed()[num_compressed:]
    assert "\x1b[2J\n(EngineCore pid=1)" in line.request
    added = server.log.read_bytes()[before:]
    assert b"max_tokens was lowered" in added
    assert b"\x1b[2J" not in added
    assert not re.search(rb"[\r\n]\(EngineCore pid=1\) ", added)
    assert len(added) < 5000, added


def test_an_oversize_prompt_gets_a_400_and_the_server_keeps_running(client, text):
    with pytest.raises(BadRequestError):
        client.completions.create(model="demo", prompt=text * 6, max_tokens=4)
    assert client.completions.create(model="demo", prompt="Hello", max_tokens=2).choices


def test_a_killed_engine_fails_all_streams(server, text):
    """Killing the engine during compressions fails all streams and ends the server.

    This is the last test on this server.
    """
    before = server.metric("vllm:kv_compress_requests_total")
    root = psutil.Process(server.process.pid)
    engine = next(p for p in root.children(recursive=True) if "EngineCore" in " ".join(p.cmdline()))
    half = text[: len(text) // 2]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        ends = [pool.submit(stream_end, server, f"{i} {half}", 1000) for i in range(6)]
        wait_for(lambda: server.metric("vllm:kv_compress_requests_total") >= before + 2)
        engine.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        reasons = [end.result(timeout=300) for end in ends]
        elapsed_s = time.monotonic() - killed
    assert server.process.wait(300) is not None
    print(f"all streams ended after {elapsed_s:.1f} s: {sorted(set(reasons))}")  # noqa: T201
    assert not {"length", "stop"} & set(reasons), reasons


def test_a_wrong_flag_stops_the_command_before_loading(demo_model, tmp_path):
    """The flag fails once the model's configuration is read."""
    flags = ["--kv-compress", "cake", "--pipeline-parallel-size", "4"]
    with (tmp_path / "log").open("w") as out:
        environment = {**os.environ, **ENVIRONMENT}
        command = ForkedCommand(["vllm", "serve", demo_model, *flags], stdout=out, env=environment)
    try:
        assert command.wait(600) == 2
    finally:
        if command.poll() is None:
            command.send_signal(signal.SIGKILL)
    log = (tmp_path / "log").read_text()
    last_line = [line for line in log.splitlines() if line.strip()][-1]
    assert "must have the same number of layers" in last_line
    assert not re.search("Loading|load_model|Traceback", log)
