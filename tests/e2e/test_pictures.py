"""Pictures over HTTP, by ordinary clients: what a real server makes of a chat that shows some."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import BadRequestError, OpenAI

import no_videos
from asking import said
from engines import BLOCK, engine, prepare_model_runner, settings
from forks import serve_forking
from idling import idle, wait_for
from vision_checkpoints import data_url, make, picture, without_videos

prepare_model_runner()

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.usefixtures(without_videos.__name__),
]

NEW = 12
SHOWN, SMALLER = 12 * 10, 6 * 9  # tokens of a picture
TEXT = "The lamp is blue, the door is red, and nobody knows who painted them so. "
FLAGS = [
    *("--enforce-eager", "--block-size", str(BLOCK), "--dtype", "float32"),
    *("--max-model-len", "1024", "--num-gpu-blocks-override", "129"),
    *("--served-model-name", "demo", "--enable-scale-out", "--enable-prompt-tokens-details"),
    *("--kv-compress", "cake", "--kv-budget", "0.3", "--kv-min-prompt", "128", "--kv-usage"),
    *("--kv-allow-override", "all", "--kv-compress-config", '{"log_requests": true}'),
]


def image(seed, columns=12, rows=10, **more):
    url = data_url(picture(columns, rows, seed))
    return {"type": "image_url", "image_url": {"url": url}, **more}


def text(repeats=5):
    return {"type": "text", "text": TEXT * repeats}


VIDEO = {"type": "video_url", "video_url": {"url": data_url(*(picture(9, 9, i) for i in range(4)))}}


def chat(*content, system=None):
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": list(content)}]


# chats, and how many tokens of each are pictures'
ASKED = [
    (chat(image(1), text()), SHOWN),
    (chat(image(2), text()), SHOWN),
    (chat(image(4), text(1), image(5, 6, 9), text(3)), SHOWN + SMALLER),
]
PICTURE = ASKED[0][0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("qwen3-vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serve_forking(model, FLAGS, folder, no_videos.SITE) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


@pytest.fixture(scope="module")
def alone(model):
    """Each answer of an engine in this process: compressed, and vLLM's own."""
    from vllm import SamplingParams

    def answers(**more):
        sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, **more)
        done = [llm.llm.chat(messages, sampling, use_tqdm=False) for messages, _ in ASKED]
        return [list(output.outputs[0].token_ids) for (output,) in done]

    options = dict(skip_tokenizer_init=False, max_model_len=1024, enable_prefix_caching=False)
    config = settings("cake", 0.3, allow_override="off")
    with engine(model, additional_config=config, **options) as llm:
        compressed, plain = answers(), answers(extra_args={"kv_compress": "off"})
    assert all(a[0] == b[0] and a != b for a, b in zip(compressed, plain, strict=True))
    return list(zip(compressed, plain, strict=True))


def ask(client, messages, xargs=None, stream=False):
    """The tokens of an answer, and its usage."""
    more = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"ignore_eos": True, "return_token_ids": True, "vllm_xargs": xargs or {}}
    answer = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=NEW, temperature=0, stream=stream,
        extra_body=body, **more,
    )  # fmt: skip
    if not stream:
        return answer.choices[0].token_ids, answer.usage
    events = list(answer)
    found = [choice.model_extra.get("token_ids") for e in events for choice in e.choices]
    return [token for tokens in found for token in tokens or ()], events[-1].usage


def kept(usage):
    return (usage.prompt_tokens_details.model_extra or {}).get("kv_compress")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_an_engines_own_and_says_what_its_prompt_keeps(stream, server, client, alone):
    for (messages, shown), (compressed, plain) in zip(ASKED, alone, strict=True):
        before = len(server.compressed())
        found, usage = ask(client, messages, stream=stream)
        assert found == compressed
        (line,) = server.compressed()[before:]
        assert kept(usage) == {
            "method": "cake",
            "budget": 0.3,
            "prompt_tokens": usage.prompt_tokens,
            "kept_tokens": line.kept_tokens,
            "layer_tokens": list(line.layer_tokens),
        }
        assert line.kept_tokens == pytest.approx(0.3 * usage.prompt_tokens, abs=BLOCK)
        assert line.blocks_before == -(-usage.prompt_tokens // BLOCK) > 2 * line.blocks_after
        assert usage.prompt_tokens_details.multimodal_tokens == {"image": shown}
        for whole in ({"kv_compress": "off"}, {"kv_budget": 1.0}):
            found, usage = ask(client, messages, whole, stream)
            assert (found, kept(usage)) == (plain, None)
        assert len(server.compressed()) == before + 1


def test_what_stays_of_pictures_is_told_and_they_can_be_protected(client):
    first = len(["<|im_start|>", *"user\n", "<|vision_start|>"])
    behind = first + SHOWN
    second = behind + len(["<|vision_end|>", *TEXT, "<|vision_start|>"])
    one = f"{first}:{behind}"
    places = [one, one, f"{one},{second}:{second + SMALLER}"]
    for (messages, shown), place in zip(ASKED, places, strict=True):
        _, usage = ask(client, messages, {"kv_by_role": True})
        told, roles = kept(usage), kept(usage)["by_role"]
        assert set(roles) == {"image", "other"}
        assert roles["image"]["tokens"] == shown
        assert sum(role["tokens"] for role in roles.values()) == usage.prompt_tokens
        stays = sum(role["tokens"] * role["kept"] for role in roles.values())
        assert stays == pytest.approx(told["kept_tokens"], abs=1e-4 * usage.prompt_tokens)
        assert roles["image"]["kept"] < 0.5
        _, usage = ask(client, messages, {"kv_by_role": True, "kv_protect": place})
        assert kept(usage)["protected_tokens"] == shown
        assert kept(usage)["by_role"]["image"] == {"tokens": shown, "kept": 1.0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "xargs", "sentence"),
    [
        (PICTURE, {"kv_protect": "question"}, "question .* its messages hold more than text"),
        (
            chat(*PICTURE[0]["content"], system="Never say orange."),
            *({"kv_protect": "system"}, "system .* a message of the chat holds more than text"),
        ),
        (chat(VIDEO, text()), {}, "holds videos, which was not tested; send it with kv_compress"),
        (chat(image(8), VIDEO, text()), {}, "may hold only text and images .* holds videos"),
        (PICTURE, {"kv_budget": 2.5}, "kv_budget must be a ratio"),
    ],
    ids=["question", "system", "video", "picture and video", "budget"],
)
def test_what_is_refused_is_a_400(stream, messages, xargs, sentence, server, client):
    name = "vllm:kv_compress_refused_requests_total"
    before, done = server.metric(name), len(server.compressed())
    with pytest.raises(BadRequestError, match=sentence):
        ask(client, messages, xargs, stream)
    assert server.metric(name) == before + 1
    if VIDEO in messages[-1]["content"]:
        found, usage = ask(client, messages, {"kv_compress": "off"}, stream)
        assert len(found) == NEW
        assert usage.prompt_tokens_details.multimodal_tokens["video"] > 0
    assert len(server.compressed()) == done


def test_a_refused_chat_takes_no_picture_from_the_next_one(client, alone):
    """Whether it was the first to show it, or showed one that is known by its name already."""
    named = chat(image(1, uuid="lamp"), text())
    known = chat({"type": "image_url", "image_url": None, "uuid": "lamp"}, text())
    refused = pytest.raises(BadRequestError, match="question cannot be found")
    for messages in (named, named, known, known):
        with refused:
            ask(client, messages, {"kv_protect": "question"})
        assert ask(client, messages)[0] == alone[0][0]


def test_every_endpoint_that_takes_pictures_compresses_them(server, client, alone):
    (compressed, _), (messages, _) = alone[0], ASKED[0]
    common = {"model": "demo", "messages": messages, "max_tokens": 16, "temperature": 0}

    def post(path, **sent):
        before = len(server.compressed())
        done = httpx.post(f"{server.url}{path}", json=sent, timeout=300)
        assert done.status_code == 200, done.text
        return done.json(), server.compressed()[before:]

    answer, (line,) = post("/v1/chat/completions", **common)
    want = answer["choices"][0]["message"]["content"]
    batch, lines = post("/v1/chat/completions/batch", **common | {"messages": [messages] * 2})
    assert [choice["message"]["content"] for choice in batch["choices"]] == [want] * 2
    assert said(batch)["kept_tokens"] == 2 * line.kept_tokens == sum(x.kept_tokens for x in lines)
    data = PICTURE[0]["content"][0]["image_url"]["url"].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    shown = [{"type": "image", "source": source}, text()]
    message, lines = post("/v1/messages", **common | {"messages": chat(*shown)})
    assert message["content"][0]["text"] == want
    assert lines[0].kept_tokens == line.kept_tokens
    more = {"max_tokens": NEW, "ignore_eos": True}
    request, _ = post("/v1/chat/completions/render", **common | more)
    full, lines = post("/inference/v1/generate", **request)
    assert full["choices"][0]["token_ids"] == compressed
    assert said(full)["kept_tokens"] == line.kept_tokens == lines[0].kept_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_responses_take_pictures(stream, client):
    (picture, words) = PICTURE[0]["content"]
    shown = {"type": "input_image", "image_url": picture["image_url"]["url"], "detail": "auto"}
    asked = [{"role": "user", "content": [shown, {**words, "type": "input_text"}]}]
    answer = client.responses.create(
        model="demo", input=asked, max_output_tokens=16, temperature=0, stream=stream,
        extra_body={"vllm_xargs": {"kv_by_role": True}},
    )  # fmt: skip
    if stream:
        answer = list(answer)[-1].response
    want = client.chat.completions.create(
        model="demo", messages=PICTURE, max_tokens=16, temperature=0,
        extra_body={"vllm_xargs": {"kv_by_role": True}},
    )  # fmt: skip
    assert answer.output_text == want.choices[0].message.content
    assert answer.usage.input_tokens_details.kv_compress == kept(want.usage)
    assert kept(want.usage)["by_role"]["image"]["tokens"] == SHOWN


def test_in_company_and_after_a_hang_up_it_is_the_same_and_every_block_returns(
    server, client, alone
):
    def leave():
        body = {"ignore_eos": True}
        with client.chat.completions.create(
            model="demo", messages=PICTURE, max_tokens=400, stream=True, extra_body=body
        ) as events:
            next(iter(events))

    with ThreadPoolExecutor(10) as together:
        leaving = together.submit(leave)
        asked = [ASKED[number % len(ASKED)][0] for number in range(9)]
        found = list(together.map(lambda messages: ask(client, messages, stream=True)[0], asked))
        leaving.result()
    assert found == [compressed for compressed, _ in alone] * 3
    wait_for(lambda: idle(server))
    planned = server.metric("vllm:kv_compress_planned_requests_total")
    compressed = {done.request for done in server.compressed()}  # a preempted one is there twice
    assert planned == server.metric("vllm:kv_compress_requests_total") == len(compressed)
