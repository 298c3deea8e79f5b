"""Per-request settings over HTTP, on every endpoint, by ordinary clients and by hostile ones."""

import json
import re

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI

from asking import QUESTION, RULE, answers, body, chat_of, post, said
from checkpoints import talking
from forks import serve_forking
from idling import wait_for
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.serving.text import long_prompt
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import settings_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCKS = 128
COMMON = [
    *("--enforce-eager", "--max-model-len", "4096", "--served-model-name", "demo"),
    *("--dtype", "float32"),  # the faster one where a CPU has no instructions for bfloat16
    *("--kv-compress", "cake", "--kv-budget", "0.2", "--kv-min-prompt", "512"),
    *("--kv-allow-override", "off,snapkv,cake", "--kv-budget-bounds", "0.1:0.5,128:1024"),
    *("--kv-compress-config", '{"log_requests": true}', "--kv-decode-budget", "512"),
    *("--kv-alias", "demo@half=snapkv:0.5", "--kv-alias", "demo@256=cake:256"),
    *("--kv-alias", "demo@full=off", "--kv-alias", "demo@more=cake:0.8", "--kv-usage"),
    *("--num-gpu-blocks-override", str(1 + BLOCKS), "--kv-protect", "system"),
]
ALIASES = {"demo@half": 0.5, "demo@256": 256, "demo@full": None, "demo@more": 0.8}


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    return talking(tmp_path_factory.mktemp("model"), demo_model)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    flags = [*COMMON, "--enable-scale-out"]  # /inference/v1/generate
    with serve_forking(model, flags, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


@pytest.fixture(scope="module")
def text(demo_model):
    from transformers import AutoTokenizer

    return long_prompt(AutoTokenizer.from_pretrained(demo_model), 1500)


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


def test_the_model_is_listed_under_all_its_names(server):
    cards = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"]
    assert [card["id"] for card in cards] == ["demo", *ALIASES]
    assert len({(card["root"], card["max_model_len"]) for card in cards}) == 1
    unknown = post(server, "completions", "Hello", {}, model="demo@half ")
    assert unknown.status_code == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_answer_under_an_alias_is_compressed_so_and_says_so(server, text, endpoint, stream):
    """Whatever requests may ask for: demo@more keeps more than the bounds allow them."""
    for model, budget in ALIASES.items():
        before = len(server.compressed())
        response = post(server, endpoint, text, {}, stream, model)
        assert response.status_code == 200, response.text
        lines = server.compressed()[before:]
        found = answers(response)
        assert {answer["model"] for answer in found} == {model}
        tokens = {answer["usage"].get("prompt_tokens", 0) for answer in found}
        tokens |= {answer["usage"].get("input_tokens", 0) for answer in found}
        if budget is None:
            assert not lines
            assert "kv_compress" not in response.text
            continue
        (line,) = lines
        want = budget if budget > 1 else budget * line.prompt_tokens
        assert line.kept_tokens == pytest.approx(want, abs=128)
        assert line.prompt_tokens in tokens
        for answer in found:
            assert said(answer) == {
                "method": "snapkv" if model == "demo@half" else "cake",
                "budget": budget,
                "prompt_tokens": line.prompt_tokens,
                "kept_tokens": line.kept_tokens,
                "layer_tokens": list(line.layer_tokens),
            }


def test_a_request_under_an_alias_asks_for_more_within_what_it_may(server, text):
    before = len(server.compressed())
    answer = post(server, "completions", text, {"kv_budget": 0.2}, model="demo@half").json()
    assert (said(answer)["method"], said(answer)["budget"]) == ("snapkv", 0.2)
    answer = post(server, "completions", text, {"kv_compress": "off"}, model="demo@half").json()
    assert said(answer) is None
    for asked in ({"kv_budget": 0.8}, {"kv_compress": "h2o"}):
        refused = post(server, "completions", text, asked, model="demo@half")
        assert refused.status_code == 400
    assert len(server.compressed()) == before + 1


def test_an_alias_works_wherever_a_model_is_named(server, text):
    def ask(path, **sent):
        before = len(server.compressed())
        done = httpx.post(f"{server.url}{path}", json=sent, timeout=300)
        assert done.status_code == 200, done.text
        return done.json(), [line.kept_tokens for line in server.compressed()[before:]]

    turn = [{"role": "user", "content": text}]
    common = {"model": "demo@256", "max_tokens": 4}
    message, kept = ask("/v1/messages", messages=turn, **common)
    assert (message["model"], kept) == ("demo@256", [pytest.approx(256, abs=128)])
    other = [{"role": "user", "content": text[: len(text) // 2]}]
    batch, kept = ask("/v1/chat/completions/batch", messages=[turn, other], **common)
    assert (batch["model"], len(kept)) == ("demo@256", 2)
    assert said(batch)["prompt_tokens"] == batch["usage"]["prompt_tokens"]
    assert said(batch)["kept_tokens"] == pytest.approx(sum(kept), abs=0.2)
    counted, _ = ask("/tokenize", model="demo@256", prompt="Hello")
    assert counted["count"] > 0
    ids, _ = ask("/tokenize", model="demo", prompt=text)
    sampling = {"max_tokens": 4, "temperature": 0}
    sent = dict(model="demo@256", token_ids=ids["tokens"], sampling_params=sampling)
    full, kept = ask("/inference/v1/generate", **sent)
    assert kept == [pytest.approx(256, abs=128)]
    assert [said(full)["kept_tokens"]] == kept
    streamed = httpx.post(
        f"{server.url}/inference/v1/generate", timeout=300,
        json={**sent, "stream": True, "stream_options": {"include_usage": True}},
    )  # fmt: skip
    (last,) = answers(streamed)
    assert said(last)["kept_tokens"] == said(full)["kept_tokens"]


def test_the_openai_client_reads_what_was_kept(client, text):
    answer = client.chat.completions.create(
        model="demo@half", messages=[{"role": "user", "content": text}], max_tokens=4
    )
    assert answer.model == "demo@half"
    kept = answer.usage.prompt_tokens_details.kv_compress
    assert kept["kept_tokens"] == pytest.approx(0.5 * answer.usage.prompt_tokens, abs=128)
    answer = client.responses.create(model="demo@half", input=text, max_output_tokens=16)
    assert answer.usage.input_tokens_details.kv_compress["method"] == "snapkv"


def test_prompts_are_added_up_and_choices_are_not(server, client, text):
    before = len(server.compressed())
    answer = client.completions.create(
        model="demo@half", prompt=[text, text[: len(text) // 2], "Hello"], n=2, max_tokens=4,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    lines = {line.prompt_tokens: line for line in server.compressed()[before:]}
    kept = answer.usage.prompt_tokens_details.kv_compress
    assert (len(answer.choices), len(lines)) == (6, 2)
    assert kept["prompt_tokens"] == sum(lines) < answer.usage.prompt_tokens
    assert kept["kept_tokens"] == pytest.approx(sum(x.kept_tokens for x in lines.values()), abs=0.2)


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


def test_a_long_answer_is_bounded_while_it_grows_and_ends(server, client):
    """2 blocks of 128 tokens, one until it is packed again and one more; 8 without a budget."""
    names = [f"vllm:kv_compress_{x}_total" for x in ("repacked_answers", "freed_answer_blocks")]
    before = {name: server.metric(name) for name in names}
    stream = client.completions.create(
        model="demo", prompt="Hello", max_tokens=1024, temperature=0, stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "vllm_xargs": {"kv_decode_budget": 256}},
    )  # fmt: skip
    held, reasons, usage = [], [], None
    for index, event in enumerate(stream):
        usage = event.usage or usage
        reasons += [choice.finish_reason for choice in event.choices if choice.finish_reason]
        if index % 32 == 31:  # the first may still find an earlier request's gauge
            held.append(round(server.metric("vllm:kv_cache_usage_perc") * BLOCKS))
    assert (reasons, usage.completion_tokens) == (["length"], 1024)
    assert max(held) <= 2 + 1 + 1, held
    times, blocks = (server.metric(name) - count for name, count in before.items())
    assert times >= 4
    assert blocks >= times - 1  # the first time may give back none


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (1024, "kv_decode_budget must be at most 512 on this server, got 1024"),
        (True, "kv_decode_budget must be a whole number of at least 2 tokens per layer, got 1"),
        ("256", "must be a whole number of at least 2 tokens per layer, got '256'"),
        (
            4,
            "decode_budget=4 tokens per layer cannot hold the decode window of 8 tokens and one"
            " more",
        ),
    ],
)
def test_the_openai_client_hears_why_a_decode_budget_is_refused(client, asked, sentence):
    with pytest.raises(BadRequestError, match=re.escape(sentence)) as refusal:
        client.completions.create(
            model="demo", prompt="Hello", max_tokens=4,
            extra_body={"vllm_xargs": {"kv_decode_budget": asked}},
        )  # fmt: skip
    assert refusal.value.status_code == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
KEYS = st.sampled_from(["kv_compress", "kv_budget", "kv_decode_budget", "kv_budgett", "x"])
ASKED = st.dictionaries(KEYS, JSON, min_size=1, max_size=3) | st.fixed_dictionaries(
    {},
    optional={
        "kv_compress": st.sampled_from(["off", "cake", "snapkv", "h2o", "custom", "CAKE", ""]),
        "kv_budget": st.floats(0, 1.2) | st.integers(-1, 2000) | st.sampled_from(["0.2", "1024"]),
        "kv_decode_budget": st.integers(-1, 600) | st.sampled_from([256.0, 256.5, "256"]),
    },
)


def refused(xargs):
    """Whether the policy of COMMON refuses what arrives as it was sent."""
    policy = {"allow_override": "off,snapkv,cake", "budget_bounds": "0.1:0.5,128:1024"}
    policy |= {"compress": "cake", "decode_budget": 512}
    try:
        settings_for(CompressionConfig.parse(policy), xargs)
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
    wait_for(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)
    assert server.metric("vllm:kv_compress_refused_requests_total") > 20
    planned = server.metric("vllm:kv_compress_planned_requests_total")
    compressed = {done.request for done in server.compressed()}  # a preempted one is there twice
    assert server.metric("vllm:kv_compress_requests_total") == planned == len(compressed)


@pytest.mark.parametrize("endpoint", ["chat/completions", "responses", "messages"])
def test_parts_of_a_chat_are_protected(server, client, text, endpoint, demo_model):
    """The tokens of their text, and one at either end at most that has letters of both sides."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(demo_model).encode
    for asked, least in (
        ("system,question", len(encode(RULE)) + len(encode(QUESTION))),
        ("system", len(encode(RULE))),
        ("tools", 0),
        (None, len(encode(RULE))),
    ):
        before = server.metric("vllm:kv_compress_protected_tokens_total")
        done = len(server.compressed())
        xargs = {} if asked is None else {"vllm_xargs": {"kv_protect": asked}}
        sent = chat_of(endpoint, text) | xargs
        answer = httpx.post(f"{server.url}/v1/{endpoint}", json=sent, timeout=300)
        assert answer.status_code == 200, answer.text
        assert len(server.compressed()) == done + 1
        wait_for(
            lambda before=before, least=least: (
                least
                <= server.metric("vllm:kv_compress_protected_tokens_total") - before
                <= least + 4
            )
        )
        if endpoint != "messages":  # which have no field for it
            assert least <= said(answer.json()).get("protected_tokens", 0) <= least + 4


@pytest.mark.parametrize(
    ("endpoint", "asked", "message"),
    [
        ("completions", "system", "system cannot be found in the prompt, since this request is no"),
        ("completions", "9000:9001", r"within the prompt's \d+ tokens, got \[9000, 9001\]"),
        ("completions", "3:9,5:12", r"must not overlap, got \[3, 9\] and \[5, 12\]"),
        ("completions", "0:1400", "1400 tokens need a budget of .* this request may have 1024"),
        ("chat/completions", "sytem", "'sytem' is unknown; did you mean 'system'"),
        ("responses", ["none", "0:9"], "none stands alone"),
    ],
)
def test_what_cannot_be_protected_is_refused(server, text, endpoint, asked, message):
    before = server.metric("vllm:kv_compress_refused_requests_total")
    refused = post(server, endpoint, text, {"kv_protect": asked})
    assert refused.status_code == 400, refused.text
    assert re.search(message, refused.json()["error"]["message"]), refused.text
    assert server.metric("vllm:kv_compress_refused_requests_total") == before + 1


def test_tokens_are_protected_on_every_endpoint(server, text):
    for endpoint in ENDPOINTS:
        for stream in (False, True):
            answer = post(server, endpoint, text, {"kv_protect": ["0:20", "30:31"]}, stream)
            assert answer.status_code == 200, answer.text
            assert {said(each)["protected_tokens"] for each in answers(answer)} == {21}


def test_chats_that_vllm_makes_other_prompts_of(server, text):
    """A batch of chats is protected as one chat is; beams are prompts of their own, left whole."""
    chat = chat_of("chat/completions", text)
    batch = {**chat, "messages": [chat["messages"]] * 2}
    answer = httpx.post(f"{server.url}/v1/chat/completions/batch", json=batch, timeout=300)
    assert answer.status_code == 200, answer.text
    assert said(answer.json())["protected_tokens"] >= 2 * 10
    before = len(server.compressed())
    beams = {**chat, "use_beam_search": True, "n": 2}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=beams, timeout=300)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2
    assert len(server.compressed()) == before
