"""Data-parallel ranks of a mixture of experts, which run each step together, by a real server.

vLLM's CPU build starts them and cannot run them, with or without this package: `gloo_experts`
holds the two collectives that it lacks.
"""

import concurrent.futures
import json
import shutil
import threading
from pathlib import Path

import httpx
import pytest

import gloo_experts
from broken_sites import broken
from checkpoints import make, tokens
from engines import engine
from forks import serve_forking
from idling import idle, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = (417, 300, 90, 700)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
NEW = 16
SETTINGS = {"compress": "cake", "budget": 0.3, "min_prompt": 128}
ASKED_FOR = {"allow_override": "off,snapkv,cake", "alias": {"half": "snapkv:0.5"}, "usage": True}
EXPERTS = broken(
    "vllm.distributed.device_communicators.cpu_communicator",
    "__import__('gloo_experts').install(module.CpuCommunicator)",
)
# The worker never sees the plan of a step with such a request.
LOSES = broken(
    "vllm_kvcompress.engine.compression.compressor",
    "begin = module.PromptCompressor.begin_step; "
    "module.PromptCompressor.begin_step = lambda self, output: ("
    "any('lose' in name for name in output.num_scheduled_tokens)"
    " and setattr(output, 'kvcompress', None), begin(self, output))",
)


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    """With a tokenizer, for the server; prompts are ids and answers are compared as ids."""
    path = make("qwen3-moe", tmp_path_factory.mktemp("checkpoints"))
    for file in Path(demo_model).glob("tokenizer*.json"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def one_engine(model):
    options = dict(max_model_len=1024, additional_config={"kvcompress": SETTINGS})
    with engine(model, **options) as llm:
        answers = llm.generate(PROMPTS, NEW)
        assert llm.compressor.compressed == 3
    return answers


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(gloo_experts.__file__, folder)
    flags = [
        *("--data-parallel-size", "2", "--api-server-count", "2", "--enforce-eager"),
        *("--distributed-executor-backend", "uni"),
        *("--dtype", "float32", "--max-model-len", "8192", "--block-size", "32"),
        *(
            "--served-model-name",
            "experts",
            "--kv-compress-config",
            json.dumps(SETTINGS | ASKED_FOR),
        ),
    ]
    # API servers count together in files; who imports the metrics' library must know that by then
    counts = folder / "counts"
    counts.mkdir()
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PROMETHEUS_MULTIPROC_DIR": str(counts)}
    with serve_forking(model, flags, folder, EXPERTS + LOSES, **more) as running:
        yield running


def body(prompt, **more):
    return {
        "model": "experts", "prompt": prompt, "max_tokens": NEW, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **more,
    }  # fmt: skip


def ask(server, prompt, rank, name=""):
    headers = {"X-data-parallel-rank": str(rank), "X-Request-Id": name or f"{rank}-{len(prompt)}"}
    url = f"{server.url}/v1/completions"
    return httpx.post(url, json=body(prompt), headers=headers, timeout=600)


def answer(*asked):
    given = ask(*asked)
    assert given.status_code == 200, given.text
    return given.json()["choices"][0]["token_ids"]


def test_a_rank_answers_as_one_engine_while_the_other_is_idle(server, one_engine):
    """The idle one runs dummy batches with our worker, before and after it had a request."""
    for rank in (0, 1, 0):
        assert [answer(server, prompt, rank) for prompt in PROMPTS] == one_engine
    assert server.metric("vllm:kv_compress_requests_total") == 3 * 3


def test_both_ranks_answer_as_one_engine_together(server, one_engine):
    """Prefills of one beside decode steps and prefill ends of the other; all blocks return."""
    before = server.metric("vllm:kv_compress_requests_total")
    asked = [(server, prompt, rank) for rank in (0, 1) for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(lambda one: answer(*one), asked)) == one_engine * 2
    # either API server may be told of a step, and not only the one that answers
    wait_for(lambda: server.metric("vllm:kv_compress_requests_total") == before + 2 * 3)
    wait_for(lambda: idle(server))


def test_two_api_servers_and_two_engines_count_together(server):
    """Every request once, under its engine, whichever process was told of it or answers it."""
    kinds = ("requests", "planned_requests", "skipped_requests", "refused_requests")
    names = [f"vllm:kv_compress_{kind}_total" for kind in kinds]
    before = [server.metric(name) for name in names]
    of_engine = [by_engine(server, names[0], number) for number in "01"]

    def chosen(item):
        index, xargs = item
        model = "experts" if xargs or index % 8 else "half"
        sent = body([index, *PROMPTS[0]], model=model, vllm_xargs=xargs)
        # a connection of its own: any API server may take it
        done = httpx.post(f"{server.url}/v1/completions", json=sent, timeout=600)
        if done.status_code != 200:
            return done.status_code
        kept = (done.json()["usage"].get("prompt_tokens_details") or {}).get("kv_compress")
        return done.json()["model"], kept and (kept["method"], kept["budget"])

    asks = [{}, {"kv_compress": "snapkv"}, {"kv_compress": "off"}, {"kv_compress": "h2o"}] * 4
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(chosen, enumerate(asks)))
    rest = [("experts", ("snapkv", 0.3)), ("experts", None), 400]
    aliased, own = ("half", ("snapkv", 0.5)), ("experts", ("cake", 0.3))
    assert found == [aliased, *rest, own, *rest] * 2

    def risen():
        return [server.metric(name) - old for name, old in zip(names, before, strict=True)]

    wait_for(lambda: sum(risen()) == 24)
    assert risen() == [8, 8, 4, 4]
    assert server.metric("vllm:kv_compress_info") == 2
    for number, old in zip("01", of_engine, strict=True):
        assert by_engine(server, names[0], number) > old


def by_engine(server, name, number):
    """A metric of one engine, summed over its labels."""
    lines = httpx.get(f"{server.url}/metrics", timeout=300).text.splitlines()
    mine = [line for line in lines if line.startswith(name) and f'engine="{number}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in mine)


def failed(answered):
    """Whether the server said so, or hung up; no answer comes with it."""
    try:
        given = answered()
    except httpx.HTTPError:
        return True
    assert "token_ids" not in given.text, given.text
    return given.status_code >= 500


def ends_whole(server, rank, begun):
    """Whether a long streamed answer comes to its end; `begun` is passed at its first token."""
    sent = body(PROMPTS[2], max_tokens=8000, stream=True)
    headers = {"X-data-parallel-rank": str(rank)}
    try:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=sent, headers=headers, timeout=600
        ) as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert "token_ids" in next(lines)
            begun.wait()
            return any('"finish_reason":"length"' in line for line in lines)
    except httpx.HTTPError:
        return False


def test_a_lost_plan_is_an_error_for_every_client(server, one_engine):
    """The last test of this server: it ends."""
    begun = threading.Barrier(3, timeout=300)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        others = [pool.submit(ends_whole, server, rank, begun) for rank in (0, 1)]
        begun.wait()
        assert failed(lambda: ask(server, PROMPTS[0], 0, "lose"))
        assert [other.result(timeout=600) for other in others] == [False, False]
    assert server.process.wait(300) is not None
    log = server.log.read_text()
    assert "workers must carry out every compression, but the step with plan" in log
