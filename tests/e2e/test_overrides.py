"""Per-request settings over HTTP, on every endpoint, by ordinary clients and by hostile ones."""

import concurrent.futures
import json
import time

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI

from checkpoints import talking
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.demo.server import serve
from vllm_kvcompress.demo.text import long_prompt
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.overrides import settings_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COMMON = [
    *("--enforce-eager", "--max-model-len", "4096", "--served-model-name", "demo"),
    *("--dtype", "float32"),  # the faster one where a CPU has no instructions for bfloat16
    *("--kv-compress", "cake", "--kv-budget", "0.2", "--kv-min-prompt", "512"),
    *("--kv-allow-override", "off,snapkv,cake", "--kv-budget-bounds", "0.1:0.5,128:1024"),
    *("--kv-compress-config", '{"log_requests": true}', "--num-gpu-blocks-override", "129"),
]


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    return talking(tmp_path_factory.mktemp("model"), demo_model)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with serve(model, COMMON, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


@pytest.fixture(scope="module")
def text(demo_model):
    from transformers import AutoTokenizer

    return long_prompt(AutoTokenizer.from_pretrained(demo_model), 1500)


def body(endpoint, text, xargs, stream):
    common = {"model": "demo", "temperature": 0, "stream": stream, "vllm_xargs": xargs}
    if endpoint == "chat/completions":
        messages = [{"role": "user", "content": text}]
        return common | {"messages": messages, "max_tokens": 4, "ignore_eos": True}
    if endpoint == "completions":
        return common | {"prompt": text, "max_tokens": 4, "ignore_eos": True}
    return common | {"input": text, "max_output_tokens": 16}


def post(server, endpoint, text, xargs, stream=False):
    return httpx.post(
        f"{server.url}/v1/{endpoint}", json=body(endpoint, text, xargs, stream), timeout=300
    )


ENDPOINTS = ["chat/completions", "completions", "responses"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_each_endpoint_takes_it_and_refuses_it(server, text, endpoint, stream):
    before = len(server.compressed())
    for xargs, kept in (
        ({"kv_compress": "off"}, None),
        ({"kv_compress": "snapkv", "kv_budget": 0.5}, 0.5),
        ({"kv_budget": 256}, 256),
    ):
        answer = post(server, endpoint, text, xargs, stream)
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.text[:200]
        lines = server.compressed()[before:]
        before += len(lines)
        assert len(lines) == (kept is not None)
        for line in lines:
            want = kept if kept > 1 else kept * line.prompt_tokens
            assert line.kept_tokens == pytest.approx(want, abs=128)
    refused = post(server, endpoint, text, {"kv_budget": 0.9}, stream)
    assert refused.status_code == 400
    assert refused.headers["content-type"].startswith("application/json")
    message = refused.json()["error"]["message"]
    assert message.startswith("kv_budget must be between 0.1 and 0.5 on this server, got 0.9")
    assert len(server.compressed()) == before


def test_the_openai_client_gets_its_own_error(client, text):
    with pytest.raises(BadRequestError, match="kv_compress must be one of"):
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": text}],
            max_tokens=4,
            extra_body={"vllm_xargs": {"kv_compress": "h2o"}},
        )


def test_several_choices_of_one_request_ask_alike(server, client, text):
    before = len(server.compressed())
    answer = client.completions.create(
        model="demo", prompt=text, max_tokens=4, n=2, temperature=0.7, seed=1,
        extra_body={"ignore_eos": True, "vllm_xargs": {"kv_budget": 0.4}},
    )  # fmt: skip
    assert len(answer.choices) == 2
    lines = server.compressed()[before:]
    assert len(lines) == 2
    for line in lines:
        assert line.kept_tokens == pytest.approx(0.4 * line.prompt_tokens, abs=128)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
KEYS = st.sampled_from(["kv_compress", "kv_budget", "kv_budgett", "x"])
ASKED = st.dictionaries(KEYS, JSON, min_size=1, max_size=3) | st.fixed_dictionaries(
    {},
    optional={
        "kv_compress": st.sampled_from(["off", "cake", "snapkv", "h2o", "custom", "CAKE", ""]),
        "kv_budget": st.floats(0, 1.2) | st.integers(-1, 2000) | st.sampled_from(["0.2", "1024"]),
    },
)


def refused(xargs):
    """Whether the policy of COMMON refuses what arrives as it was sent."""
    policy = {"allow_override": "off,snapkv,cake", "budget_bounds": "0.1:0.5,128:1024"}
    try:
        settings_for(CompressionConfig.parse({"compress": "cake", **policy}), xargs)
    except OverrideError:
        return True
    # vLLM's own rule for integers of extra arguments
    return any(type(x) is int and not -(2**63) <= x < 2**64 for x in xargs.values())


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(xargs=ASKED, endpoint=st.sampled_from(ENDPOINTS), stream=st.booleans())
def test_no_body_is_an_engine_error(server, xargs, endpoint, stream):
    """Any JSON that Python's client can write: answered, or refused with a sentence."""
    data = json.dumps(body(endpoint, "Hello", xargs, stream))
    answer = httpx.post(
        f"{server.url}/v1/{endpoint}",
        content=data,
        headers={"content-type": "application/json"},
        timeout=300,
    )
    assert answer.status_code in (200, 400), (answer.status_code, answer.text)
    if all(isinstance(value, str | float) or type(value) is int for value in xargs.values()):
        assert (answer.status_code == 400) is refused(xargs), (xargs, answer.text)
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]
    else:
        assert '"error"' not in answer.text or '"error":null' in answer.text.replace(" ", "")


def test_after_all_that_the_server_is_as_before(server, client, text):
    answer = client.completions.create(
        model="demo", prompt=text, max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 4
    end = time.monotonic() + 300
    while server.metric("vllm:kv_cache_usage_perc") and time.monotonic() < end:
        time.sleep(0.1)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:kv_compress_refused_requests_total") > 20
    planned = server.metric("vllm:kv_compress_planned_requests_total")
    assert server.metric("vllm:kv_compress_requests_total") == planned == len(server.compressed())


def test_two_api_servers_and_two_engines_count_together(model, text, tmp_path):
    """Every request once, under its engine, whichever process was told of it."""
    flags = [*COMMON, "--api-server-count", "2", "--data-parallel-size", "2"]
    asks = [{}, {"kv_compress": "snapkv"}, {"kv_compress": "off"}, {"kv_compress": "h2o"}] * 4
    with serve(model, flags, tmp_path / "log", deadline_s=600) as server:

        def ask(item):
            index, xargs = item
            sent = body("completions", f"{index} {text[:2500]}", xargs, stream=False)
            with httpx.Client() as own:  # its own connection: any API server may take it
                return own.post(f"{server.url}/v1/completions", json=sent, timeout=300).status_code

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            codes = list(pool.map(ask, enumerate(asks)))
        assert codes == [200, 200, 200, 400] * 4
        end = time.monotonic() + 300
        name = "vllm:kv_compress_requests_total"
        while server.metric(name) < 8 and time.monotonic() < end:
            time.sleep(0.1)
        assert server.metric(name) == 8
        assert server.metric("vllm:kv_compress_planned_requests_total") == 8
        assert server.metric("vllm:kv_compress_skipped_requests_total") == 4
        assert server.metric("vllm:kv_compress_refused_requests_total") == 4
        assert server.metric("vllm:kv_compress_info") == 2
        lines = httpx.get(f"{server.url}/metrics", timeout=300).text.splitlines()
        for engine in "01":
            mine = [x for x in lines if x.startswith(name) and f'engine="{engine}"' in x]
            assert sum(float(line.rpartition(" ")[2]) for line in mine) > 0
