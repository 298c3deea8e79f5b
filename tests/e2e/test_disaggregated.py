"""One server prefills prompts and another one compresses and decodes them, behind a router.

Outputs must equal those of an engine with the same settings that computes the prompts itself and
compresses them at the same step.
"""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from engines import model_runner_v1_only, prepare_model_runner

prepare_model_runner()  # before the imports that load Triton

from checkpoints import text_checkpoint, tokens
from disaggregated import (
    DECODE,
    LENGTH,
    OUTPUT_TOKENS,
    PROMPTS,
    TO_PREFILL,
    M,
    body,
    complete,
    local_outputs_of,
    output_ids,
    prefill_params,
    proxy,
    pulling,
    submit,
    transfer_server,
)
from server_metrics import idle, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow, model_runner_v1_only]


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    return text_checkpoint(tmp_path_factory.mktemp("model"), demo_model)


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory):
    """Start an unmodified prefill server and a compressing decode server in parallel."""
    server_contexts = [
        transfer_server(model, tmp_path_factory.mktemp(role), role, *flags)
        for role, flags in (("kv_producer", []), ("kv_consumer", DECODE))
    ]
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield list(pool.map(stack.enter_context, server_contexts))


@pytest.fixture(scope="module")
def prefill(servers):
    return servers[0]


@pytest.fixture(scope="module")
def decode(servers):
    return servers[1]


@pytest.fixture(scope="module")
def local_outputs(model):
    return local_outputs_of(model)


@pytest.fixture(scope="module")
def router(prefill, decode):
    with proxy(prefill, decode) as url:
        yield url


def test_outputs_match_one_compressed_engine(router, decode, local_outputs):
    """Send all prompts together, then one by one, when two of them hit the prefix cache."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        responses = list(pool.map(lambda prompt: complete(router, prompt), PROMPTS))
    assert [output_ids(response) for response in responses] == local_outputs
    details = [response.json()["usage"]["prompt_tokens_details"] for response in responses]
    reports = [report["kv_compress"] for report in details]
    assert [report["lookahead"] for report in reports] == [M] * 3
    assert all(report["kept_tokens"] < report["prompt_tokens"] / 2 for report in reports)
    for report in reports:
        mean = sum(report["layer_tokens"]) / len(report["layer_tokens"])
        assert report["kept_tokens"] == pytest.approx(mean, abs=0.05)
    assert all(response.json()["kv_transfer_params"] is None for response in responses)
    wait_for(lambda: idle(decode))
    hits = decode.metric("vllm:prefix_cache_hits_total")
    pulled = decode.metric("vllm:external_prefix_cache_hits_total")
    assert pulled > 0
    assert pulled + hits >= sum(map(len, PROMPTS)) - len(PROMPTS)
    assert [output_ids(complete(router, prompt)) for prompt in PROMPTS] == local_outputs
    assert decode.metric("vllm:prefix_cache_hits_total") > hits
    assert decode.metric("vllm:external_prefix_cache_hits_total") > pulled


def test_metrics_count_compression_and_transfers(router, decode):
    names = ("requests_total", "freed_blocks_total", "packed_blocks_total")
    compression_metrics = [f"vllm:kv_compress_{name}" for name in names]
    connector_metrics = [
        "vllm:nixl_bytes_transferred_count",
        "vllm:nixl_num_failed_transfers_total",
    ]

    def current():
        return [decode.metric(name) for name in compression_metrics + connector_metrics]

    before = current()
    output_ids(complete(router, tokens(LENGTH, seed=6)))
    requests, freed, packed, pulls, failed = (
        after - previous for after, previous in zip(current(), before, strict=True)
    )
    assert (requests, pulls, failed) == (1, 1, 0)
    # the prompt's 13 full blocks, and the 4 blocks of kept tokens that replace them
    assert (freed, packed) == (13, 4)


MESSAGES = [{"role": "user", "content": "Count to ten."}]
ENDPOINTS = {
    "chat/completions": {"messages": MESSAGES},
    "completions": {"prompt": PROMPTS[0]},
    "responses": {"input": "Count to ten."},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_unsupported_requests_to_a_decode_server_get_a_400(endpoint, stream, prefill, decode):
    """The prefill server is also told to free the blocks of the refused prompt."""
    request = {"model": "demo", "stream": stream, **ENDPOINTS[endpoint]}
    no_lookahead = {"vllm_xargs": {"kv_lookahead": 0}}
    wrong = [(no_lookahead, "kv_lookahead must be at least 1, got 0")]
    if endpoint != "responses":
        wrong.append(({"n": 2}, "got n=2"))
        wrong.append(({"use_beam_search": True}, "without use_beam_search"))

    def refused(extra, message):
        response = httpx.post(f"{decode.url}/v1/{endpoint}", json=request | extra, timeout=300)
        assert response.status_code == 400, response.text
        assert message in response.text

    refused({"kv_transfer_params": TO_PREFILL}, "send the request to a prefill server")
    for extra, message in wrong:
        pull = {"kv_transfer_params": prefill_params(prefill, body(PROMPTS[0]))}
        refused(extra | pull, message)
        assert_blocks_return(prefill, decode)
    wait_for(lambda: idle(decode))


def assert_blocks_return(prefill, decode):
    """Assert that the prefill server frees its blocks before their lease of 30 s ends.

    The decode server sends the notice in one of its steps, and the prefill server reads it in one
    of its steps. Idle servers have no steps, so this sends both a short request.
    """

    def idle_after_a_step():
        for server in (decode, prefill):
            assert complete(server.url, PROMPTS[2][:32], max_tokens=2).status_code == 200
        return idle(prefill)

    wait_for(idle_after_a_step, seconds=15)


def assert_two_prompts_are_refused(decode, prefill, path, prompts):
    pull = {"model": "demo", "kv_transfer_params": prefill_params(prefill, body(PROMPTS[0]))}
    response = httpx.post(f"{decode.url}/v1/{path}", json=pull | prompts, timeout=300)
    assert response.status_code == 400, response.text
    assert "got 2 prompts" in response.text


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 2, "temperature": 1.0}, "got n=2"),
        ({"extra_args": {"kv_lookahead": 0}}, "kv_lookahead must be at least 1, got 0"),
    ],
    ids=["two choices", "no look-ahead"],
)
def test_refused_token_requests_free_the_prefill_servers_blocks(params, message, prefill, decode):
    pull = {"kv_transfer_params": prefill_params(prefill, body(PROMPTS[0]))}
    request_body = {
        "model": "demo",
        "token_ids": PROMPTS[0],
        "sampling_params": params | {"max_tokens": 9},
    }
    response = httpx.post(
        f"{decode.url}/inference/v1/generate", json=request_body | pull, timeout=300
    )
    assert response.status_code == 400, response.text
    assert message in response.text
    assert_blocks_return(prefill, decode)


def test_a_request_with_two_prompts_cannot_pull(prefill, decode):
    assert_two_prompts_are_refused(decode, prefill, "completions", {"prompt": PROMPTS[:2]})
    assert_blocks_return(prefill, decode)


def test_a_prompt_can_be_pulled_only_once(prefill, decode, local_outputs):
    """By the time of a second pull, the blocks may hold another prompt."""
    pull = {"kv_transfer_params": prefill_params(prefill, body(PROMPTS[2]))}
    assert output_ids(complete(decode.url, PROMPTS[2], **pull)) == local_outputs[2]
    request = body(PROMPTS[2], **{"kv_transfer_params": prefill_params(prefill, body(PROMPTS[2]))})
    for status in (200, 400, 400):  # a router that retries keeps the request id
        second = httpx.post(
            f"{decode.url}/v1/completions", json=request, headers={"X-Request-Id": "r"}, timeout=300
        )
        assert second.status_code == status, second.text
    second = complete(decode.url, PROMPTS[2], **pull)
    assert second.status_code == 400, second.text
    assert "another has pulled this prompt" in second.text
    assert_blocks_return(prefill, decode)


def test_doctor_passes_on_a_decode_server(decode):
    line = [sys.executable, "-m", "vllm_kvcompress.cli", "doctor", "--url", decode.url]
    result = subprocess.run(
        [*line, "--expect", "on"], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@contextlib.contextmanager
def unread_request(url, request_body):
    """Send a request, and close the connection at the end without reading the response."""
    address, text = httpx.URL(url), json.dumps(request_body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address.host}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(head.encode() + text)
        yield


def disconnect(url, request_body):
    with unread_request(url, request_body):
        pass


def test_blocks_return_after_clients_disconnect(prefill, decode, router, local_outputs):
    """Clients disconnect during prefill and during decoding."""
    long_prompt = tokens(1000, seed=9)
    disconnect(prefill.url, body(long_prompt, max_tokens=1, kv_transfer_params=TO_PREFILL))
    extra = {"kv_transfer_params": prefill_params(prefill, body(PROMPTS[0])), "stream": True}
    request_body = body(PROMPTS[0], **extra) | {"max_tokens": 500}
    with httpx.stream(
        "POST", f"{decode.url}/v1/completions", json=request_body, timeout=300
    ) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        for _ in range(M + 4):
            next(lines)
    wait_for(lambda: idle(decode))
    assert output_ids(complete(router, PROMPTS[2])) == local_outputs[2]


def test_a_client_disconnects_while_its_prompt_is_pulled(prefill, decode, local_outputs):
    """The prefill server is paused meanwhile, so that the pull has started and cannot finish."""
    prompt = tokens(960, seed=10)
    pull = {"kv_transfer_params": prefill_params(prefill, body(prompt))}
    pulled = decode.metric("vllm:nixl_bytes_transferred_count")
    os.killpg(prefill.process.pid, signal.SIGSTOP)
    try:
        with unread_request(decode.url, body(prompt, **pull)):
            wait_for(lambda: decode.metric("vllm:num_requests_waiting") == 1, seconds=30)
            wait_for(lambda: decode.metric("vllm:kv_cache_usage_perc") > 0, seconds=30)
        wait_for(lambda: decode.metric("vllm:num_requests_waiting") == 0, seconds=30)
        # the pull may still write to these blocks, so no other request may get them
        assert decode.metric("vllm:kv_cache_usage_perc") > 0
        assert output_ids(complete(decode.url, PROMPTS[2])) == local_outputs[2]
        assert decode.metric("vllm:kv_cache_usage_perc") > 0
    finally:
        os.killpg(prefill.process.pid, signal.SIGCONT)
    # the prefill server may still hold blocks of the client that left in the previous test
    wait_for(lambda: idle(decode), seconds=30)
    assert decode.metric("vllm:nixl_bytes_transferred_count") == pulled + 1


def test_a_refused_batch_of_chats_does_not_stop_the_engine(prefill, decode):
    """The request has no id for the notice, so the prefill server frees its blocks by lease."""
    chats = {"messages": [MESSAGES, MESSAGES]}
    assert_two_prompts_are_refused(decode, prefill, "chat/completions/batch", chats)
    assert complete(decode.url, PROMPTS[2][:32]).status_code == 200


def test_a_killed_prefill_server_affects_only_its_prompts(
    prefill, decode, router, model, local_outputs, monkeypatch
):
    """Later pulls fail or are recomputed, depending on the policy; other requests are served."""
    requests = [body(prompt) for prompt in PROMPTS]
    stale = [prefill_params(prefill, request) for request in requests]
    with pulling(model, monkeypatch, policy="recompute") as llm:
        free = llm.free_blocks
        submit(llm, prefill, "before", PROMPTS[1])
        assert list(llm.drain().values()) == local_outputs[1:2]
        os.killpg(prefill.process.pid, signal.SIGKILL)
        llm.submit("after", PROMPTS[0], OUTPUT_TOKENS, extra_args={"kv_transfer_params": stale[0]})
        assert list(llm.drain().values()) == local_outputs[:1]
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
    failed = complete(decode.url, PROMPTS[2], kv_transfer_params=stale[2])
    assert failed.status_code == 500
    assert output_ids(complete(decode.url, PROMPTS[2])) == local_outputs[2]
    wait_for(lambda: idle(decode))
    assert decode.metric("vllm:nixl_num_failed_transfers_total") > 0
