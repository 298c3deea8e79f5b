"""Prompts that one server computes and another compresses: two servers, and engines that pull.

The strong check is the one without a connector: an engine with the same settings that computes the
prompts itself packs them at the same step, and gives the same answers.
"""

import concurrent.futures
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from engines import V2, engine, first_runner, prepare_model_runner, settings

prepare_model_runner()  # what follows loads Triton

import again
from checkpoints import talking, tokens
from disaggregated import (
    POLLING,
    TO_PREFILL,
    WORKER,
    nixl,
    one_of_two,
    prefilled,
    proxy,
    transfer,
)
from idling import idle, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

M, LENGTH, ANSWER = 8, 417, 40
SETTINGS = settings("cake-chunk", 0.3, lookahead=M)
DECODE = [
    *("--kv-compress", "cake-chunk", "--kv-budget", "0.3", "--kv-lookahead", str(M)),
    *("--kv-min-prompt", "128", "--kv-allow-override", "off,cake-chunk,snapkv", "--kv-usage"),
]
PROMPTS = [
    tokens(LENGTH, seed=1),
    tokens(LENGTH, seed=1)[:200] + tokens(300, seed=2),  # begins as the first
    tokens(384, seed=3),  # whole blocks
]
if V2:  # in Triton's interpreter
    ANSWER, PROMPTS = 16, PROMPTS[:1]
# where the process of another test has started it
URL = "DISAGGREGATED_PREFILL_URL"
MODEL = "DISAGGREGATED_MODEL"


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    known = os.environ.get(MODEL)
    return known or talking(tmp_path_factory.mktemp("model"), demo_model)


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
def prefill(request):
    if URL in os.environ:
        return SimpleNamespace(url=os.environ[URL])
    return request.getfixturevalue("servers")[0]


@pytest.fixture(scope="module")
def decode(servers):
    return servers[1]


@pytest.fixture(scope="module")
def here(model):
    """Engines that compute the prompts themselves: their answers without and with compression."""
    with engine(model, max_model_len=1024) as llm:
        whole = llm.generate(PROMPTS, ANSWER)
    with engine(model, max_model_len=1024, additional_config=SETTINGS) as llm:
        packed = llm.generate(PROMPTS, ANSWER)
        assert llm.compressor.compressed == len(PROMPTS)
    assert whole != packed
    assert [each[: M + 1] for each in whole] == [each[: M + 1] for each in packed]
    return packed


def body(prompt, **more):
    common = {"model": "demo", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
    return common | {"ignore_eos": True, "return_token_ids": True} | more


def complete(url, prompt, **more):
    return httpx.post(f"{url}/v1/completions", json=body(prompt, **more), timeout=300)


def ids(answer):
    answer.raise_for_status()
    return answer.json()["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def router(prefill, decode):
    with proxy(prefill, decode) as url:
        yield url


@first_runner
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


@first_runner
def test_metrics_are_ours_and_the_connectors(router, decode):
    assert decode.metric("vllm:kv_compress_requests_total") >= 6
    assert decode.metric("vllm:kv_compress_freed_blocks_total") > 6 * 7
    assert decode.metric("vllm:nixl_bytes_transferred_count") >= 6
    assert decode.metric("vllm:nixl_num_failed_transfers_total") == 0


MESSAGES = [{"role": "user", "content": "Count to ten."}]
ENDPOINTS = {
    "chat/completions": {"messages": MESSAGES},
    "completions": {"prompt": PROMPTS[0]},
    "responses": {"input": "Count to ten."},
}


@first_runner
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_a_decode_server_cannot_do_is_a_400(endpoint, stream, prefill, decode):
    """And the prefill server is told, as of every prompt that is not pulled."""
    asked = {"model": "demo", "stream": stream, **ENDPOINTS[endpoint]}
    no_lookahead = {"vllm_xargs": {"kv_lookahead": 0}}
    wrong = [(no_lookahead, "kv_lookahead must be at least 1, got 0")]
    if endpoint != "responses":
        wrong.append(({"n": 2}, "got n=2"))

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


@first_runner
def test_several_prompts_cannot_pull_one(prefill, decode):
    """Of a batch of chats, which has no id, no prefill server is told; and the engine lives."""
    for path, several in (
        ("completions", {"prompt": [PROMPTS[0], PROMPTS[1]]}),
        ("chat/completions/batch", {"messages": [MESSAGES, MESSAGES]}),
    ):
        pull = {"model": "demo", "kv_transfer_params": prefilled(prefill, body(PROMPTS[0]))}
        answer = httpx.post(f"{decode.url}/v1/{path}", json=pull | several, timeout=300)
        assert answer.status_code == 400, answer.text
        assert "got 2 prompts" in answer.text
        if path == "completions":
            gives_back(prefill, decode)
    assert complete(decode.url, PROMPTS[2][:32]).status_code == 200


@first_runner
def test_doctor_finds_a_decode_server_well(decode):
    line = [sys.executable, "-m", "vllm_kvcompress.cli", "doctor", "--url", decode.url]
    done = subprocess.run(
        [*line, "--expect", "on"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def hang_up(url, sent):
    """Ask, and go at once."""
    asked, text = httpx.URL(url), json.dumps(sent).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {asked.host}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    with socket.create_connection((asked.host, asked.port)) as connection:
        connection.sendall(head.encode() + text)


@first_runner
def test_clients_hang_up(prefill, decode, router, here):
    """While their prompt is computed, while it is pulled, and while it is answered."""
    long = tokens(1000, seed=9)
    hang_up(prefill.url, body(long, max_tokens=1, kv_transfer_params=TO_PREFILL))
    hang_up(decode.url, body(long, kv_transfer_params=prefilled(prefill, body(long))))
    more = {"kv_transfer_params": prefilled(prefill, body(PROMPTS[0])), "stream": True}
    sent = body(PROMPTS[0], **more) | {"max_tokens": 500}
    with httpx.stream("POST", f"{decode.url}/v1/completions", json=sent, timeout=300) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        for _ in range(M + 4):
            next(lines)
    wait_for(lambda: idle(decode))
    assert ids(complete(router, PROMPTS[2])) == here[2]


# -- engines in this process -----------------------------------------------------------------------


def pulling(model, monkeypatch, *, policy="fail", own=SETTINGS, **options):
    for name, value in nixl().items():
        monkeypatch.setenv(name, value)
    worker = importlib.import_module(WORKER)
    monkeypatch.setattr(worker, "nixl_agent_config", worker.nixl_agent_config)
    exec(POLLING, {"module": worker})
    config = transfer("kv_consumer", kv_load_failure_policy=policy)
    usual = {"max_model_len": 1024, "max_num_seqs": 4}
    return engine(model, additional_config=own, kv_transfer_config=config, **usual | options)


def submit(llm, prefill, name, prompt, answer=ANSWER):
    params = prefilled(prefill, body(prompt))
    llm.submit(name, prompt, answer, extra_args={"kv_transfer_params": params})


@pytest.mark.parametrize("caching", [True] if V2 else [True, False])
def test_it_is_packed_at_the_same_step_by_the_same_queries(
    caching, model, prefill, here, monkeypatch
):
    with pulling(model, monkeypatch, enable_prefix_caching=caching) as llm:
        free, computed = llm.free_blocks, []
        packed = llm.watch_packing(lambda done: (done.todo.tokens, done.todo.plan.window))
        execute = llm.worker.execute_model

        def executing(output):
            computed.append(dict(output.num_scheduled_tokens))
            assert output.kvcompress is None or output.num_scheduled_tokens
            return execute(output)

        llm.worker.execute_model = executing
        submit(llm, prefill, "r", PROMPTS[0])
        assert list(llm.drain().values()) == here[:1]
        assert llm.free_blocks == free
    # the prompt's last 16 judge it too, so they are computed, and no other token of it
    steps = [count for step in computed for count in step.values()]
    assert steps[0] == 16
    assert sum(steps) == 16 + ANSWER - 1
    assert packed == [(LENGTH + M, M + 16)]


def one_is_preempted(llm):
    """Answers by request, of which the first was preempted once its prompt was packed."""
    done, preempted = {}, False
    while llm.llm.llm_engine.has_unfinished_requests():
        done |= {key: list(each.outputs[0].token_ids) for key, each in llm.step().items()}
        for request in llm.running():
            first = request.request_id.startswith("0")
            if first and request.num_output_tokens == M + 4 and not preempted:
                # as vLLM does where the pool is short
                preempted = True
                llm.scheduler.running.remove(request)
                llm.scheduler._preempt_request(request, 0.0)
    assert preempted
    return {key.split("-")[0]: answer for key, answer in done.items()}


def begin_together(scheduler):
    """As where all prompts are computed: none starts before all were pulled, in their order."""
    handle = scheduler._handle_blocked_waiting_request

    def handling(request):
        if request.status.name != "WAITING_FOR_REMOTE_KVS":
            return handle(request)
        here = len(scheduler.finished_recving_kv_req_ids)
        began[0] = began[0] or here == len(PROMPTS)
        return began[0] and handle(request)

    began = [False]
    scheduler._handle_blocked_waiting_request = handling


@first_runner
def test_preempted_requests_and_such_as_find_no_slot_go_on(model, prefill, monkeypatch):
    """What was pulled once is not pulled again, and is packed as where nothing is pulled.

    With one slot for a look-ahead, the others are packed as they come, by their last queries.
    """
    own = settings("cake-chunk", 0.3, lookahead=M, lookahead_slots=1)
    options = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 2048}
    with engine(model, additional_config=own, **options) as llm:
        for at, prompt in enumerate(PROMPTS):
            llm.submit(str(at), prompt, ANSWER)
        alone = one_is_preempted(llm)
    with pulling(model, monkeypatch, own=own, **options) as llm:
        free, answered = llm.free_blocks, llm.watch_packing(lambda done: done.todo.answered)
        for at, prompt in enumerate(PROMPTS):
            submit(llm, prefill, str(at), prompt)
        begin_together(llm.scheduler)
        assert one_is_preempted(llm) == alone
        assert llm.free_blocks == free
        # two found no slot, and one was packed again with a part of its answer
        assert sorted(answered, key=str) == [M, None, None, None]
        assert not llm.manager.planner._looking


@first_runner
def test_one_that_ends_while_it_is_pulled_gives_all_back(model, prefill, here, monkeypatch):
    from vllm.v1.request import RequestStatus

    with pulling(model, monkeypatch) as llm:
        free = llm.free_blocks
        submit(llm, prefill, "gone", PROMPTS[0])
        llm.step()
        (request,) = llm.scheduler.requests.values()
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        assert llm.free_blocks < free
        # nothing is planned: all that it holds are its prompt's own blocks
        assert llm.manager.num_blocks_held(request.request_id) == -(-LENGTH // 32)
        assert not llm.manager.lookaheads
        assert not llm.manager.planner._looking
        llm.llm.llm_engine.abort_request([request.request_id], internal=True)
        submit(llm, prefill, "next", PROMPTS[2])
        assert list(llm.drain().values()) == here[2:]
        wait_for(lambda: (llm.settle(), llm.free_blocks == free)[1], seconds=60)
        assert not llm.manager.planner.schedules
        assert not llm.manager.planner._looking


@first_runner
def test_answers_may_be_bounded(model, prefill, monkeypatch):
    own = settings("cake", 0.3, lookahead=M, decode_budget=96, decode_interval=32)
    with engine(model, max_model_len=1024, additional_config=own) as llm:
        alone = llm.generate(PROMPTS[:1], 120)
    with pulling(model, monkeypatch, own=own) as llm:
        again_packed = llm.watch_repacking()
        submit(llm, prefill, "r", PROMPTS[0], 120)
        assert list(llm.drain().values()) == alone
        assert again_packed


@first_runner
def test_on_model_runner_v2(model, prefill, tmp_path):
    """CUDA runs it: the engines of this file on it, against the same prefill server."""
    file = str(Path(__file__).relative_to(again.ROOT))
    known = {"VLLM_USE_V2_MODEL_RUNNER": "1", URL: prefill.url, MODEL: model}
    done = again.run([file], known, tmp_path)
    assert done.ok, done.said
    assert done.passed[file] == 1


@first_runner
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
