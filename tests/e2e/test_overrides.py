"""Per-request settings over HTTP on every endpoint, with valid and invalid values."""

import json
import re
import shlex

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI

from checkpoints import text_checkpoint
from endpoint_requests import (
    ENDPOINTS,
    QUESTION,
    RULE,
    body,
    chat_body,
    compression_report,
    post,
    usage_events,
)
from forks import serve_forking
from invalid_settings import DECODE_BUDGETS, EXTRA_ARGS, must_be_refused
from long_text import long_prompt
from misplaced_settings import MISPLACED, MISSPELT, UNRELATED, minimal_requests
from server_metrics import wait_for
from site_patches import patch_on_import

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCKS = 128
# float32 is faster than bfloat16 on CPUs without bfloat16 instructions
COMMON = shlex.split(f"""
    --enforce-eager --max-model-len 4096 --served-model-name demo --dtype float32
    --kv-compress cake --kv-budget 0.2 --kv-min-prompt 512 --kv-allow-override off,snapkv,cake
    --kv-budget-bounds 0.1:0.5,128:1024 --kv-compress-config '{{"log_requests": true}}'
    --kv-decode-budget 512 --kv-alias demo@half=snapkv:0.5 --kv-alias demo@256=cake:256
    --kv-alias demo@full=off --kv-alias demo@more=cake:0.8 --kv-usage
    --num-gpu-blocks-override {1 + BLOCKS} --kv-protect system
""")
# Writes a line to the server's log whenever a process parses or resolves the options of a request.
COUNTING = """
import os, sys
def logging_calls(name, function):
    def logging(*args, **kwargs):
        print(f"options {name} in process {os.getpid()}", file=sys.stderr, flush=True)
        return function(*args, **kwargs)
    return logging
module.RequestOptions.parse = logging_calls("parsed", module.RequestOptions.parse)
module.RequestChoices.resolve = logging_calls("resolved", module.RequestChoices.resolve)
"""
COUNTED = f"exec({COUNTING!r}, {{'module': module}})"
ALIASES = {"demo@half": 0.5, "demo@256": 256, "demo@full": None, "demo@more": 0.8}


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    return text_checkpoint(tmp_path_factory.mktemp("model"), demo_model)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    flags = [*COMMON, "--enable-scale-out"]  # enables /inference/v1/generate
    site = patch_on_import("vllm_kvcompress.settings.request_options", COUNTED)
    with serve_forking(model, flags, tmp_path_factory.mktemp("server"), site) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


@pytest.fixture(scope="module")
def text(demo_model):
    from transformers import AutoTokenizer

    return long_prompt(AutoTokenizer.from_pretrained(demo_model), 1500)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_each_endpoint_applies_valid_settings_and_refuses_invalid_ones(
    server, text, endpoint, stream
):
    before = len(server.compressed())
    for xargs, budget in (
        ({"kv_compress": "off"}, None),
        ({"kv_compress": "snapkv", "kv_budget": 0.5}, 0.5),
        ({"kv_budget": 256}, 256),
    ):
        response = post(server, endpoint, text, xargs, stream)
        assert response.status_code == 200, response.text
        assert "error" not in response.text[:200]
        lines = server.compressed()[before:]
        before += len(lines)
        assert len(lines) == (budget is not None)
        for line in lines:
            expected = budget if budget > 1 else budget * line.prompt_tokens
            assert line.kept_tokens == pytest.approx(expected, abs=128)
    refusal = post(server, endpoint, text, {"kv_budget": 0.9}, stream)
    assert refusal.status_code == 400
    assert refusal.headers["content-type"].startswith("application/json")
    message = refusal.json()["error"]["message"]
    assert message.startswith("kv_budget must be between 0.1 and 0.5 on this server, got 0.9")
    assert len(server.compressed()) == before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_options_are_built_once_in_the_server_and_once_in_the_engine(
    server, text, endpoint, stream
):
    before = len(server.log.read_text())
    asks = {"kv_compress": "snapkv", "kv_budget": 0.4, "kv_protect": "0:9"}
    response = post(server, endpoint, text, asks, stream)
    assert response.status_code == 200, response.text
    added = server.log.read_text()[before:]
    calls = re.findall(r"options (\w+) in process (\d+)", added)
    assert sorted(name for name, _ in calls) == ["parsed", "resolved", "resolved"]
    parsed_by = dict(calls)["parsed"]
    assert [name for name, process in calls if process == parsed_by] == ["parsed", "resolved"]


@pytest.mark.parametrize("value", [["off"], "off", 1])
@pytest.mark.parametrize("stream", [False, True])
def test_options_that_a_client_sends_are_replaced(server, text, value, stream):
    before = len(server.compressed())
    asks = {"kvcompress_options": value, "kv_compress": "snapkv", "kv_budget": 0.5}
    response = post(server, "chat/completions", text, asks, stream)
    assert response.status_code == 200, response.text
    (line,) = server.compressed()[before:]
    assert line.kept_tokens == pytest.approx(0.5 * line.prompt_tokens, abs=128)


def test_the_model_list_contains_all_aliases(server):
    cards = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"]
    assert [card["id"] for card in cards] == ["demo", *ALIASES]
    assert len({(card["root"], card["max_model_len"]) for card in cards}) == 1
    unknown = post(server, "completions", "Hello", {}, model="demo@half ")
    assert unknown.status_code == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_alias_settings_are_applied_and_reported(server, text, endpoint, stream):
    """An alias may exceed the budget bounds of requests, as demo@more does."""
    block_bytes = set()
    for model, budget in ALIASES.items():
        before = len(server.compressed())
        response = post(server, endpoint, text, {}, stream, model)
        assert response.status_code == 200, response.text
        lines = server.compressed()[before:]
        events = usage_events(response)
        assert {response["model"] for response in events} == {model}
        tokens = {response["usage"].get("prompt_tokens", 0) for response in events}
        tokens |= {response["usage"].get("input_tokens", 0) for response in events}
        if budget is None:
            assert not lines
            assert "kv_compress" not in response.text
            continue
        (line,) = lines
        expected = budget if budget > 1 else budget * line.prompt_tokens
        assert line.kept_tokens == pytest.approx(expected, abs=128)
        assert line.prompt_tokens in tokens
        for response in events:
            report = compression_report(response)
            block_bytes.add(report.pop("kept_bytes") / line.blocks_after)
            block_bytes.add(report.pop("uncompressed_bytes") / line.blocks_before)
            assert report == {
                "method": "snapkv" if model == "demo@half" else "cake",
                "budget": budget,
                "packed_dtype": "auto",
                "prompt_tokens": line.prompt_tokens,
                "kept_tokens": line.kept_tokens,
                "layer_tokens": list(line.layer_tokens),
            }
    assert len(block_bytes) == 1


def test_requests_under_an_alias_may_override_it_within_the_bounds(server, text):
    before = len(server.compressed())
    response = post(server, "completions", text, {"kv_budget": 0.2}, model="demo@half").json()
    assert (compression_report(response)["method"], compression_report(response)["budget"]) == (
        "snapkv",
        0.2,
    )
    response = post(server, "completions", text, {"kv_compress": "off"}, model="demo@half").json()
    assert compression_report(response) is None
    for extra_args, message in (
        ({"kv_budget": 0.8}, "kv_budget must be between 0.1 and 0.5"),
        ({"kv_compress": "h2o"}, "kv_compress must be one of"),
    ):
        refusal = post(server, "completions", text, extra_args, model="demo@half")
        assert refusal.status_code == 400
        assert message in refusal.json()["error"]["message"]
    assert len(server.compressed()) == before + 1


def test_aliases_work_on_every_endpoint_with_a_model_name(server, text):
    def post_ok(path, **request):
        before = len(server.compressed())
        response = httpx.post(f"{server.url}{path}", json=request, timeout=300)
        assert response.status_code == 200, response.text
        return response.json(), [line.kept_tokens for line in server.compressed()[before:]]

    turn = [{"role": "user", "content": text}]
    common = {"model": "demo@256", "max_tokens": 4}
    message, kept_tokens = post_ok("/v1/messages", messages=turn, **common)
    assert (message["model"], kept_tokens) == ("demo@256", [pytest.approx(256, abs=128)])
    other_turn = [{"role": "user", "content": text[: len(text) // 2]}]
    batch, kept_tokens = post_ok(
        "/v1/chat/completions/batch", messages=[turn, other_turn], **common
    )
    assert (batch["model"], len(kept_tokens)) == ("demo@256", 2)
    assert compression_report(batch)["prompt_tokens"] == batch["usage"]["prompt_tokens"]
    assert compression_report(batch)["kept_tokens"] == pytest.approx(sum(kept_tokens), abs=0.2)
    counted, _ = post_ok("/tokenize", model="demo@256", prompt="Hello")
    assert counted["count"] > 0
    ids, _ = post_ok("/tokenize", model="demo", prompt=text)
    sampling = {"max_tokens": 4, "temperature": 0}
    request = dict(model="demo@256", token_ids=ids["tokens"], sampling_params=sampling)
    full, kept_tokens = post_ok("/inference/v1/generate", **request)
    assert kept_tokens == [pytest.approx(256, abs=128)]
    assert [compression_report(full)["kept_tokens"]] == kept_tokens
    streamed = httpx.post(
        f"{server.url}/inference/v1/generate", timeout=300,
        json={**request, "stream": True, "stream_options": {"include_usage": True}},
    )  # fmt: skip
    (final_event,) = usage_events(streamed)
    assert compression_report(final_event)["kept_tokens"] == compression_report(full)["kept_tokens"]


@pytest.mark.parametrize("path", list(minimal_requests()))
@pytest.mark.parametrize("name", ["demo", "demo@half"])
def test_only_the_model_of_an_http_request_names_an_alias(server, path, name):
    before = server.metric("vllm:kv_compress_refused_requests_total")
    for alias in ("demo@full", "nonsense"):
        request = minimal_requests()[path] | {"model": name}
        if "sampling_params" in request:
            request["sampling_params"] |= {"extra_args": {"kv_alias": alias}}
        else:
            request["vllm_xargs"] = {"kv_alias": alias}
        response = httpx.post(f"{server.url}{path}", json=request, timeout=300)
        assert response.status_code == 400, response.text
        assert f"got '{alias}'; name the alias in the request's `model`" in response.text
    assert server.metric("vllm:kv_compress_refused_requests_total") == before + 2


def test_a_rendered_request_keeps_its_alias(server, text):
    before = len(server.compressed())
    chat = chat_body("chat/completions", text) | {"model": "demo@256"}
    rendered = httpx.post(f"{server.url}/v1/chat/completions/render", json=chat, timeout=300)
    assert rendered.status_code == 200, rendered.text
    assert rendered.json()["sampling_params"]["extra_args"]["kv_alias"] == "demo@256"
    url = f"{server.url}/inference/v1/generate"
    response = httpx.post(url, json=rendered.json(), timeout=300)
    assert response.status_code == 200, response.text
    (line,) = server.compressed()[before:]
    assert line.kept_tokens == pytest.approx(256, abs=128)
    other = httpx.post(url, json=rendered.json() | {"model": "demo"}, timeout=300)
    assert other.status_code == 400, other.text


def test_reports_add_up_prompts_but_not_choices(server, client, text):
    before = len(server.compressed())
    response = client.completions.create(
        model="demo@half", prompt=[text, text[: len(text) // 2], "Hello"], n=2, max_tokens=4,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    lines = {line.prompt_tokens: line for line in server.compressed()[before:]}
    report = response.usage.prompt_tokens_details.kv_compress
    assert (len(response.choices), len(lines)) == (6, 2)
    assert report["prompt_tokens"] == sum(lines) < response.usage.prompt_tokens
    assert report["kept_tokens"] == pytest.approx(
        sum(x.kept_tokens for x in lines.values()), abs=0.2
    )


def test_all_choices_of_a_request_use_its_settings(server, client, text):
    before = len(server.compressed())
    response = client.completions.create(
        model="demo", prompt=text, max_tokens=4, n=2, temperature=0.7, seed=1,
        extra_body={"ignore_eos": True, "vllm_xargs": {"kv_budget": 0.4}},
    )  # fmt: skip
    assert len(response.choices) == 2
    lines = server.compressed()[before:]
    assert len(lines) == 2
    for line in lines:
        assert line.kept_tokens == pytest.approx(0.4 * line.prompt_tokens, abs=128)


def test_a_decode_budget_bounds_the_blocks_of_a_long_output(server, client):
    """With a decode budget of 2 blocks it holds at most 4 blocks of 128 tokens instead of 8."""
    names = [f"vllm:kv_compress_{x}_total" for x in ("repacked_answers", "freed_answer_blocks")]
    before = {name: server.metric(name) for name in names}
    stream = client.completions.create(
        model="demo", prompt="Hello", max_tokens=1024, temperature=0, stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "vllm_xargs": {"kv_decode_budget": 256}},
    )  # fmt: skip
    used_blocks, reasons, usage = [], [], None
    for index, event in enumerate(stream):
        usage = event.usage or usage
        reasons += [choice.finish_reason for choice in event.choices if choice.finish_reason]
        if index % 32 == 31:  # at first the gauge may still show an earlier request
            used_blocks.append(round(server.metric("vllm:kv_cache_usage_perc") * BLOCKS))
    assert (reasons, usage.completion_tokens) == (["length"], 1024)
    assert max(used_blocks) <= 2 + 1 + 1, used_blocks
    num_compressions, blocks = (server.metric(name) - count for name, count in before.items())
    assert num_compressions >= 4
    assert blocks >= num_compressions - 1  # the first compression may free no block


@pytest.mark.parametrize(("decode_budget", "message"), DECODE_BUDGETS)
def test_refused_decode_budgets_are_explained(client, decode_budget, message):
    with pytest.raises(BadRequestError, match=re.escape(message)) as refusal:
        client.completions.create(
            model="demo", prompt="Hello", max_tokens=4,
            extra_body={"vllm_xargs": {"kv_decode_budget": decode_budget}},
        )  # fmt: skip
    assert refusal.value.status_code == 400


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(xargs=EXTRA_ARGS, endpoint=st.sampled_from(ENDPOINTS), stream=st.booleans())
def test_no_extra_arguments_cause_a_server_error(server, xargs, endpoint, stream):
    """Any JSON value that a client can send is either served or refused with an error message."""
    data = json.dumps(body(endpoint, "Hello", xargs, stream))
    response = httpx.post(
        f"{server.url}/v1/{endpoint}",
        content=data,
        headers={"content-type": "application/json"},
        timeout=300,
    )
    assert response.status_code in (200, 400), (response.status_code, response.text)
    if all(isinstance(value, str | float) or type(value) is int for value in xargs.values()):
        assert (response.status_code == 400) is must_be_refused(xargs), (xargs, response.text)
    if response.status_code == 400:
        assert response.json()["error"]["message"]
    else:
        assert '"error"' not in response.text or '"error":null' in response.text.replace(" ", "")


def test_the_server_still_works_after_refusals(server, client, text):
    response = client.completions.create(
        model="demo", prompt=text, max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert response.usage.completion_tokens == 4
    wait_for(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)
    assert server.metric("vllm:kv_compress_refused_requests_total") > 20
    planned = server.metric("vllm:kv_compress_planned_requests_total")
    compressed = {line.request for line in server.compressed()}  # a preempted request appears twice
    assert server.metric("vllm:kv_compress_requests_total") == planned == len(compressed)


@pytest.mark.parametrize("endpoint", ["chat/completions", "responses", "messages"])
def test_chat_parts_are_protected(server, client, text, endpoint, demo_model):
    """Protect the text's tokens, plus at most one token at each end that spans the boundary."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(demo_model).encode
    for protect, min_tokens in (
        ("system,question", len(encode(RULE)) + len(encode(QUESTION))),
        ("system", len(encode(RULE))),
        ("tools", 0),
        (None, len(encode(RULE))),
    ):
        before = server.metric("vllm:kv_compress_protected_tokens_total")
        num_compressed = len(server.compressed())
        xargs = {} if protect is None else {"vllm_xargs": {"kv_protect": protect}}
        request = chat_body(endpoint, text) | xargs
        response = httpx.post(f"{server.url}/v1/{endpoint}", json=request, timeout=300)
        assert response.status_code == 200, response.text
        assert len(server.compressed()) == num_compressed + 1
        wait_for(
            lambda before=before, min_tokens=min_tokens: (
                min_tokens
                <= server.metric("vllm:kv_compress_protected_tokens_total") - before
                <= min_tokens + 4
            )
        )
        if endpoint != "messages":  # its usage has no field for it
            assert (
                min_tokens
                <= compression_report(response.json()).get("protected_tokens", 0)
                <= min_tokens + 4
            )


@pytest.mark.parametrize(
    ("endpoint", "protect", "message"),
    [
        ("completions", "system", "system cannot be found in the prompt, because this request is"),
        ("completions", "9000:9001", r"within the prompt's \d+ tokens, got \[9000, 9001\]"),
        ("completions", "3:9,5:12", r"must not overlap, got \[3, 9\] and \[5, 12\]"),
        ("completions", "0:1400", "1400 tokens need a budget of .* this request may have 1024"),
        ("chat/completions", "sytem", "'sytem' is unknown; did you mean 'system'"),
        ("responses", ["none", "0:9"], "none cannot be combined"),
    ],
)
def test_invalid_protections_are_refused(server, text, endpoint, protect, message):
    before = server.metric("vllm:kv_compress_refused_requests_total")
    refusal = post(server, endpoint, text, {"kv_protect": protect})
    assert refusal.status_code == 400, refusal.text
    assert re.search(message, refusal.json()["error"]["message"]), refusal.text
    assert server.metric("vllm:kv_compress_refused_requests_total") == before + 1


def test_token_ranges_are_protected_on_every_endpoint(server, text):
    for endpoint in ENDPOINTS:
        for stream in (False, True):
            response = post(server, endpoint, text, {"kv_protect": ["0:20", "30:31"]}, stream)
            assert response.status_code == 200, response.text
            assert {
                compression_report(event)["protected_tokens"] for event in usage_events(response)
            } == {21}


def test_batches_and_beams_of_chats_are_served(server, text):
    """Chats in a batch are protected like single chats; beams stay uncompressed."""
    chat = chat_body("chat/completions", text)
    batch = {**chat, "messages": [chat["messages"]] * 2}
    response = httpx.post(f"{server.url}/v1/chat/completions/batch", json=batch, timeout=300)
    assert response.status_code == 200, response.text
    assert compression_report(response.json())["protected_tokens"] >= 2 * 10
    before = len(server.compressed())
    beams = {**chat, "use_beam_search": True, "n": 2}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=beams, timeout=300)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 2
    assert len(server.compressed()) == before


@pytest.mark.parametrize("path", list(minimal_requests()))
@pytest.mark.parametrize(("added", "message"), MISPLACED, ids=repr)
def test_a_setting_outside_vllm_xargs_is_refused(server, path, added, message):
    before = server.metric("vllm:kv_compress_refused_requests_total")
    response = httpx.post(f"{server.url}{path}", json=minimal_requests()[path] | added, timeout=300)
    assert response.status_code == 400, response.text
    place = "sampling_params.extra_args" if "inference" in path else "vllm_xargs"
    assert message.format(place=place) in response.json()["error"]["message"]
    assert server.metric("vllm:kv_compress_refused_requests_total") == before + 1


@pytest.mark.parametrize("name", ["demo", "demo@half"])
@pytest.mark.parametrize("stream", [False, True])
def test_misplaced_settings_are_explained_to_the_openai_client(client, name, stream):
    for extra_body, message in (
        ({"kv_bugdet": 0.05}, "did you mean 'kv_budget' inside vllm_xargs?"),
        ({"extra_body": {"vllm_xargs": {"kv_budget": 0.05}}}, "'extra_body' is an argument"),
        ({"vllm_xargs": {"budget": 0.3}}, "'budget' is unknown; did you mean 'kv_budget'?"),
    ):
        with pytest.raises(BadRequestError, match=re.escape(message)):
            client.completions.create(
                model=name, prompt="Hello", max_tokens=2, stream=stream, extra_body=extra_body
            )


@pytest.mark.parametrize(("extra_args", "message"), MISSPELT, ids=repr)
def test_errors_quote_misspelt_settings_as_sent(server, extra_args, message):
    for endpoint in ENDPOINTS:
        response = post(server, endpoint, "Hello", extra_args)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
    path = "/inference/v1/generate"
    for params in (
        {"extra_args": extra_args},
        {"max_tokens": 2, **extra_args},
        {"vllm_xargs": extra_args},
    ):
        request = minimal_requests()[path] | {"sampling_params": params}
        response = httpx.post(f"{server.url}{path}", json=request, timeout=300)
        only_bare = "extra_args" not in params and "vllm_xargs" not in params
        assert response.status_code == (200 if only_bare and "budget" in extra_args else 400), (
            response.text
        )


@pytest.mark.parametrize("path", list(minimal_requests()))
@pytest.mark.parametrize("added", UNRELATED, ids=repr)
def test_unrelated_keys_are_left_to_vllm(server, path, added):
    response = httpx.post(f"{server.url}{path}", json=minimal_requests()[path] | added, timeout=300)
    assert response.status_code == 200, response.text
