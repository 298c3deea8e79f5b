"""A server of a mixture-of-experts model with two data-parallel ranks, which run steps in lockstep.

vLLM's CPU build can start such ranks but not run them; `gloo_experts` adds the two collectives that
it lacks.
"""

import concurrent.futures
import json
import shlex
import shutil
import threading
from pathlib import Path

import httpx
import pytest

import gloo_experts
from checkpoints import make, tokens
from engines import engine
from forks import serve_importing
from server_metrics import idle, wait_for
from site_patches import patch_on_import

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = (417, 300, 90, 700)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
NEW = 16
SETTINGS = {"compress": "cake", "budget": 0.3, "min_prompt": 128}
FEATURES = {"allow_override": "off,snapkv,cake", "alias": {"half": "snapkv:0.5"}, "usage": True}
EXPERTS = patch_on_import(
    "vllm.distributed.device_communicators.cpu_communicator",
    "__import__('gloo_experts').install(module.CpuCommunicator)",
)
# Removes the compression plan of each step with a request named "lose" before the worker sees it.
LOSE_PLANS = patch_on_import(
    "vllm_kvcompress.engine.compression.compressor",
    "begin = module.PromptCompressor.begin_step; "
    "module.PromptCompressor.begin_step = lambda self, output: ("
    "any('lose' in name for name in output.num_scheduled_tokens)"
    " and setattr(output, 'kvcompress', None), begin(self, output))",
)


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    """Write the checkpoint with a tokenizer, which the server needs; the tests use token ids."""
    path = make("qwen3-moe", tmp_path_factory.mktemp("checkpoints"))
    for file in Path(demo_model).glob("tokenizer*.json"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def one_engine(model):
    options = dict(max_model_len=1024, additional_config={"kvcompress": SETTINGS})
    with engine(model, **options) as llm:
        outputs = llm.generate(PROMPTS, NEW)
        assert llm.compressor.compressed == 3
    return outputs


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(gloo_experts.__file__, folder)
    flags = [
        *shlex.split("""
            --data-parallel-size 2 --api-server-count 2 --enforce-eager
            --distributed-executor-backend uni --dtype float32 --max-model-len 8192 --block-size 32
            --served-model-name experts
        """),
        "--kv-compress-config",
        json.dumps(SETTINGS | FEATURES),
    ]
    # API servers share counters in files; prometheus_client reads the setting on import
    metrics_folder = folder / "counts"
    metrics_folder.mkdir()
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PROMETHEUS_MULTIPROC_DIR": str(metrics_folder),
    }
    with serve_importing(model, flags, folder, EXPERTS + LOSE_PLANS, **environment) as running:
        yield running


def body(prompt, **fields):
    return {
        "model": "experts", "prompt": prompt, "max_tokens": NEW, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **fields,
    }  # fmt: skip


def complete(server, prompt, rank, name=""):
    headers = {"X-data-parallel-rank": str(rank), "X-Request-Id": name or f"{rank}-{len(prompt)}"}
    url = f"{server.url}/v1/completions"
    return httpx.post(url, json=body(prompt), headers=headers, timeout=600)


def output_ids(*request):
    response = complete(*request)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def test_a_rank_matches_one_engine_while_the_other_is_idle(server, one_engine):
    """The idle rank runs dummy batches, both before and after its first request."""
    for rank in (0, 1, 0):
        assert [output_ids(server, prompt, rank) for prompt in PROMPTS] == one_engine
    assert server.metric("vllm:kv_compress_requests_total") == 3 * 3


def test_both_ranks_match_one_engine_when_both_are_busy(server, one_engine):
    """Prefills on one rank overlap decode steps on the other; all blocks return."""
    before = server.metric("vllm:kv_compress_requests_total")
    requests = [(server, prompt, rank) for rank in (0, 1) for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(lambda request: output_ids(*request), requests)) == one_engine * 2
    # any API server may receive the counts of a step, not only the one that serves the request
    wait_for(lambda: server.metric("vllm:kv_compress_requests_total") == before + 2 * 3)
    wait_for(lambda: idle(server))


def test_metrics_add_up_over_two_api_servers_and_two_engines(server):
    """Each request is counted once, under its engine, whichever API server handles it."""
    kinds = ("requests", "planned_requests", "skipped_requests", "refused_requests")
    names = [f"vllm:kv_compress_{kind}_total" for kind in kinds]
    before = [server.metric(name) for name in names]
    of_engine = [by_engine(server, names[0], number) for number in "01"]

    def model_and_settings(item):
        index, xargs = item
        model = "experts" if xargs or index % 8 else "half"
        request = body([index, *PROMPTS[0]], model=model, vllm_xargs=xargs)
        # a new connection, so that any API server may accept it
        response = httpx.post(f"{server.url}/v1/completions", json=request, timeout=600)
        if response.status_code != 200:
            return response.status_code
        report = (response.json()["usage"].get("prompt_tokens_details") or {}).get("kv_compress")
        return response.json()["model"], report and (report["method"], report["budget"])

    extra_args = [{}, {"kv_compress": "snapkv"}, {"kv_compress": "off"}, {"kv_compress": "h2o"}] * 4
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(model_and_settings, enumerate(extra_args)))
    rest = [("experts", ("snapkv", 0.3)), ("experts", None), 400]
    with_alias, server_default = ("half", ("snapkv", 0.5)), ("experts", ("cake", 0.3))
    assert results == [with_alias, *rest, server_default, *rest] * 2

    def increases():
        return [
            server.metric(name) - previous for name, previous in zip(names, before, strict=True)
        ]

    wait_for(lambda: sum(increases()) == 24)
    assert increases() == [8, 8, 4, 4]
    assert server.metric("vllm:kv_compress_info") == 2
    for number, previous in zip("01", of_engine, strict=True):
        assert by_engine(server, names[0], number) > previous


def by_engine(server, name, number):
    """Return a metric of one engine, summed over its other labels."""
    lines = httpx.get(f"{server.url}/metrics", timeout=300).text.splitlines()
    engine_lines = [
        line for line in lines if line.startswith(name) and f'engine="{number}"' in line
    ]
    return sum(float(line.rpartition(" ")[2]) for line in engine_lines)


def request_fails(send):
    """Return True if the request failed: a status of 500 or more, or a closed connection."""
    try:
        response = send()
    except httpx.HTTPError:
        return True
    assert "token_ids" not in response.text, response.text
    return response.status_code >= 500


def stream_completes(server, rank, started):
    """Return True if a long stream reaches its end; waits at `started` after the first token."""
    request = body(PROMPTS[2], max_tokens=8000, stream=True)
    headers = {"X-data-parallel-rank": str(rank)}
    try:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=request, headers=headers, timeout=600
        ) as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert "token_ids" in next(lines)
            started.wait()
            return any('"finish_reason":"length"' in line for line in lines)
    except httpx.HTTPError:
        return False


def test_a_lost_plan_fails_the_requests_of_all_clients(server, one_engine):
    """The server exits, so this is the last test that uses it."""
    started = threading.Barrier(3, timeout=300)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream_completes, server, rank, started) for rank in (0, 1)]
        started.wait()
        assert request_fails(lambda: complete(server, PROMPTS[0], 0, "lose"))
        assert [stream.result(timeout=600) for stream in streams] == [False, False]
    assert server.process.wait(300) is not None
    log = server.log.read_text()
    assert "workers must carry out every compression, but the step with plan" in log
