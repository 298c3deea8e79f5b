"""Prompts that one server computes and another compresses: two servers, and a router.

The strong check is the one without a connector: an engine with the same settings that computes the
prompts itself packs them at the same step, and gives the same answers.
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

from engines import first_runner, prepare_model_runner

prepare_model_runner()  # what follows loads Triton

from checkpoints import talking, tokens
from disaggregated import (
    ANSWER,
    DECODE,
    LENGTH,
    PROMPTS,
    TO_PREFILL,
    M,
    body,
    complete,
    computed_here,
    ids,
    one_of_two,
    prefilled,
    proxy,
    pulling,
    submit,
)
from idling import idle, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow, first_runner]


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    return talking(tmp_path_factory.mktemp("model"), demo_model)


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory):
    """vLLM alone, and one that compresses: both start at once."""
    both = [
        one_of_two(model, tmp_path_factory.mktemp(role), role, *flags)
        for role, flags in (("kv_producer", []), ("kv_consumer", DECODE))
    ]
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield list(pool.map(stack.enter_context, both))


@pytest.fixture(scope="module")
def prefill(servers):
    return servers[0]


@pytest.fixture(scope="module")
def decode(servers):
    return servers[1]


@pytest.fixture(scope="module")
def here(model):
    return computed_here(model)


@pytest.fixture(scope="module")
def router(prefill, decode):
    with proxy(prefill, decode) as url:
        yield url


def test_answers_are_those_of_one_compressed_server(router, decode, here):
    """All at once, and one after the other: then two find a part of their prompt in the cache."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda prompt: complete(router, prompt), PROMPTS))
    assert [ids(answer) for answer in answers] == here
    details = [answer.json()["usage"]["prompt_tokens_details"] for answer in answers]
    said = [each["kv_compress"] for each in details]
    assert [each["lookahead"] for each in said] == [M] * 3
    assert all(each["kept_tokens"] < each["prompt_tokens"] / 2 for each in said)
    assert all(answer.json()["kv_transfer_params"] is None for answer in answers)
    wait_for(lambda: idle(decode))
    hits = decode.metric("vllm:prefix_cache_hits_total")
    pulled = decode.metric("vllm:external_prefix_cache_hits_total")
    assert pulled > 0
    assert pulled + hits >= sum(map(len, PROMPTS)) - len(PROMPTS)
    assert [ids(complete(router, prompt)) for prompt in PROMPTS] == here
    assert decode.metric("vllm:prefix_cache_hits_total") > hits
    assert decode.metric("vllm:external_prefix_cache_hits_total") > pulled


def test_metrics_are_ours_and_the_connectors(router, decode):
    names = ("requests_total", "freed_blocks_total", "packed_blocks_total")
    ours = [f"vllm:kv_compress_{name}" for name in names]
    theirs = ["vllm:nixl_bytes_transferred_count", "vllm:nixl_num_failed_transfers_total"]

    def now():
        return [decode.metric(name) for name in ours + theirs]

    before = now()
    ids(complete(router, tokens(LENGTH, seed=6)))
    requests, freed, packed, pulls, failed = (
        after - old for after, old in zip(now(), before, strict=True)
    )
    assert (requests, pulls, failed) == (1, 1, 0)
    # its full blocks, and a budget's worth of pages in their place
    assert (freed, packed) == (13, 4)


MESSAGES = [{"role": "user", "content": "Count to ten."}]
ENDPOINTS = {
    "chat/completions": {"messages": MESSAGES},
    "completions": {"prompt": PROMPTS[0]},
    "responses": {"input": "Count to ten."},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_a_decode_server_cannot_do_is_a_400(endpoint, stream, prefill, decode):
    """And the prefill server is told, as of every prompt that is not pulled."""
    asked = {"model": "demo", "stream": stream, **ENDPOINTS[endpoint]}
    no_lookahead = {"vllm_xargs": {"kv_lookahead": 0}}
    wrong = [(no_lookahead, "kv_lookahead must be at least 1, got 0")]
    if endpoint != "responses":
        wrong.append(({"n": 2}, "got n=2"))
        wrong.append(({"use_beam_search": True}, "without use_beam_search"))

    def refused(more, message):
        answer = httpx.post(f"{decode.url}/v1/{endpoint}", json=asked | more, timeout=300)
        assert answer.status_code == 400, answer.text
        assert message in answer.text

    refused({"kv_transfer_params": TO_PREFILL}, "send it to a prefill server")
    for more, message in wrong:
        pull = {"kv_transfer_params": prefilled(prefill, body(PROMPTS[0]))}
        refused(more | pull, message)
        gives_back(prefill, decode)
    wait_for(lambda: idle(decode))


def gives_back(prefill, decode):
    """A prefill server has blocks for nobody, long before the half minute that it keeps them for.

    It is told in one of the decode server's steps and hears of it in one of its own, and servers
    that are idle have none.
    """

    def told():
        for server in (decode, prefill):
            assert complete(server.url, PROMPTS[2][:32], max_tokens=2).status_code == 200
        return idle(prefill)

    wait_for(told, seconds=15)


def refuses_two(decode, prefill, path, several):
    pull = {"model": "demo", "kv_transfer_params": prefilled(prefill, body(PROMPTS[0]))}
    answer = httpx.post(f"{decode.url}/v1/{path}", json=pull | several, timeout=300)
    assert answer.status_code == 400, answer.text
    assert "got 2 prompts" in answer.text


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"n": 2, "temperature": 1.0}, "got n=2"),
        ({"extra_args": {"kv_lookahead": 0}}, "kv_lookahead must be at least 1, got 0"),
    ],
    ids=["two answers", "no look-ahead"],
)
def test_what_is_refused_of_tokens_is_told_too(asked, message, prefill, decode):
    pull = {"kv_transfer_params": prefilled(prefill, body(PROMPTS[0]))}
    sent = {"model": "demo", "token_ids": PROMPTS[0], "sampling_params": asked | {"max_tokens": 9}}
    answer = httpx.post(f"{decode.url}/inference/v1/generate", json=sent | pull, timeout=300)
    assert answer.status_code == 400, answer.text
    assert message in answer.text
    gives_back(prefill, decode)


def test_several_prompts_cannot_pull_one(prefill, decode):
    refuses_two(decode, prefill, "completions", {"prompt": PROMPTS[:2]})
    gives_back(prefill, decode)


def test_a_prompt_is_pulled_once(prefill, decode, here):
    """Its blocks may be another prompt's by the time that somebody asks again."""
    pull = {"kv_transfer_params": prefilled(prefill, body(PROMPTS[2]))}
    assert ids(complete(decode.url, PROMPTS[2], **pull)) == here[2]
    asked = body(PROMPTS[2], **{"kv_transfer_params": prefilled(prefill, body(PROMPTS[2]))})
    for status in (200, 400, 400):  # a router that asks again keeps the id
        again = httpx.post(
            f"{decode.url}/v1/completions", json=asked, headers={"X-Request-Id": "r"}, timeout=300
        )
        assert again.status_code == status, again.text
    again = complete(decode.url, PROMPTS[2], **pull)
    assert again.status_code == 400, again.text
    assert "another has pulled this prompt" in again.text
    gives_back(prefill, decode)


def test_doctor_finds_a_decode_server_well(decode):
    line = [sys.executable, "-m", "vllm_kvcompress.cli", "doctor", "--url", decode.url]
    done = subprocess.run(
        [*line, "--expect", "on"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def hanging(url, sent):
    """Ask, and go without an answer."""
    asked, text = httpx.URL(url), json.dumps(sent).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {asked.host}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    with socket.create_connection((asked.host, asked.port)) as connection:
        connection.sendall(head.encode() + text)
        yield


def hang_up(url, sent):
    with hanging(url, sent):
        pass


def test_clients_hang_up(prefill, decode, router, here):
    """While their prompt is computed, and while it is answered."""
    long = tokens(1000, seed=9)
    hang_up(prefill.url, body(long, max_tokens=1, kv_transfer_params=TO_PREFILL))
    more = {"kv_transfer_params": prefilled(prefill, body(PROMPTS[0])), "stream": True}
    sent = body(PROMPTS[0], **more) | {"max_tokens": 500}
    with httpx.stream("POST", f"{decode.url}/v1/completions", json=sent, timeout=300) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        for _ in range(M + 4):
            next(lines)
    wait_for(lambda: idle(decode))
    assert ids(complete(router, PROMPTS[2])) == here[2]


def test_a_client_hangs_up_while_its_prompt_is_pulled(prefill, decode, here):
    """The prefill server stands still meanwhile, so that the pull has begun and is not over."""
    prompt = tokens(960, seed=10)
    pull = {"kv_transfer_params": prefilled(prefill, body(prompt))}
    pulled = decode.metric("vllm:nixl_bytes_transferred_count")
    os.killpg(prefill.process.pid, signal.SIGSTOP)
    try:
        with hanging(decode.url, body(prompt, **pull)):
            wait_for(lambda: decode.metric("vllm:num_requests_waiting") == 1, seconds=30)
            wait_for(lambda: decode.metric("vllm:kv_cache_usage_perc") > 0, seconds=30)
        wait_for(lambda: decode.metric("vllm:num_requests_waiting") == 0, seconds=30)
        # its blocks are still written to, and nobody else's
        assert decode.metric("vllm:kv_cache_usage_perc") > 0
        assert ids(complete(decode.url, PROMPTS[2])) == here[2]
        assert decode.metric("vllm:kv_cache_usage_perc") > 0
    finally:
        os.killpg(prefill.process.pid, signal.SIGCONT)
    # the prefill server may still keep what it computed for the client that went in the test before
    wait_for(lambda: idle(decode), seconds=30)
    assert decode.metric("vllm:nixl_bytes_transferred_count") == pulled + 1


def test_a_batch_of_chats_that_is_refused_leaves_its_engine_alive(prefill, decode):
    """It has no id by which the prefill server could be told, which waits until its lease ends."""
    chats = {"messages": [MESSAGES, MESSAGES]}
    refuses_two(decode, prefill, "chat/completions/batch", chats)
    assert complete(decode.url, PROMPTS[2][:32]).status_code == 200


def test_a_prefill_server_is_killed(prefill, decode, router, model, here, monkeypatch):
    """What was to be pulled from it fails, or is computed here; all else is served."""
    asked = [body(prompt) for prompt in PROMPTS]
    stale = [prefilled(prefill, each) for each in asked]
    with pulling(model, monkeypatch, policy="recompute") as llm:
        free = llm.free_blocks
        submit(llm, prefill, "before", PROMPTS[1])
        assert list(llm.drain().values()) == here[1:2]
        os.killpg(prefill.process.pid, signal.SIGKILL)
        llm.submit("after", PROMPTS[0], ANSWER, extra_args={"kv_transfer_params": stale[0]})
        assert list(llm.drain().values()) == here[:1]
        llm.settle()
        assert llm.free_blocks == free
    failed = complete(decode.url, PROMPTS[2], kv_transfer_params=stale[2])
    assert failed.status_code == 500
    assert ids(complete(decode.url, PROMPTS[2])) == here[2]
    wait_for(lambda: idle(decode))
    assert decode.metric("vllm:nixl_num_failed_transfers_total") > 0
