"""A server compresses chats with images that OpenAI clients send over HTTP."""

import shlex
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import BadRequestError, OpenAI

import no_videos
from endpoint_requests import compression_report
from engines import BLOCK, engine, prepare_model_runner, settings
from forks import serve_importing
from server_metrics import idle, wait_for
from vision_checkpoints import data_url, make, picture, without_videos

prepare_model_runner()

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.usefixtures(without_videos.__name__),
]

NEW = 12
IMAGE_TOKENS, SMALL_IMAGE_TOKENS = 12 * 10, 6 * 9
TEXT = "The lamp is blue, the door is red, and nobody knows who painted them so. "
FLAGS = shlex.split(f"""
    --enforce-eager --block-size {BLOCK} --dtype float32 --max-model-len 1024
    --num-gpu-blocks-override 129 --served-model-name demo --enable-scale-out
    --enable-prompt-tokens-details --kv-compress cake --kv-budget 0.3 --kv-min-prompt 128
    --kv-usage --kv-allow-override all --kv-compress-config '{{"log_requests": true}}'
""")


def image(seed, columns=12, rows=10, **fields):
    url = data_url(picture(columns, rows, seed))
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def text(repeats=5):
    return {"type": "text", "text": TEXT * repeats}


VIDEO = {"type": "video_url", "video_url": {"url": data_url(*(picture(9, 9, i) for i in range(4)))}}


def chat(*content, system=None):
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": list(content)}]


# chats, each with its number of image tokens
CHATS = [
    (chat(image(1), text()), IMAGE_TOKENS),
    (chat(image(2), text()), IMAGE_TOKENS),
    (chat(image(4), text(1), image(5, 6, 9), text(3)), IMAGE_TOKENS + SMALL_IMAGE_TOKENS),
]
PICTURE_CHAT = CHATS[0][0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("qwen3-vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serve_importing(model, FLAGS, folder, no_videos.SITE) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


@pytest.fixture(scope="module")
def local_outputs(model):
    """Return (compressed, uncompressed) output tokens of each chat from a local engine."""
    from vllm import SamplingParams

    def generate(**sampling_options):
        sampling = SamplingParams(
            temperature=0, max_tokens=NEW, ignore_eos=True, **sampling_options
        )
        outputs = [llm.llm.chat(messages, sampling, use_tqdm=False) for messages, _ in CHATS]
        return [list(output.outputs[0].token_ids) for (output,) in outputs]

    options = dict(skip_tokenizer_init=False, max_model_len=1024, enable_prefix_caching=False)
    config = settings("cake", 0.3, allow_override="off")
    with engine(model, additional_config=config, **options) as llm:
        compressed, uncompressed_output = generate(), generate(extra_args={"kv_compress": "off"})
    assert all(
        a[0] == b[0] and a != b for a, b in zip(compressed, uncompressed_output, strict=True)
    )
    return list(zip(compressed, uncompressed_output, strict=True))


def complete(client, messages, xargs=None, stream=False):
    """Return the output tokens and the usage of one chat completion."""
    stream_options = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"ignore_eos": True, "return_token_ids": True, "vllm_xargs": xargs or {}}
    response = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=NEW, temperature=0, stream=stream,
        extra_body=body, **stream_options,
    )  # fmt: skip
    if not stream:
        return response.choices[0].token_ids, response.usage
    events = list(response)
    output = [choice.model_extra.get("token_ids") for e in events for choice in e.choices]
    return [token for tokens in output for token in tokens or ()], events[-1].usage


def compression_of(usage):
    return (usage.prompt_tokens_details.model_extra or {}).get("kv_compress")


@pytest.mark.parametrize("stream", [False, True])
def test_outputs_match_an_engine_and_report_the_kept_tokens(stream, server, client, local_outputs):
    block_bytes = set()
    for (messages, image_tokens), (compressed, uncompressed_output) in zip(
        CHATS, local_outputs, strict=True
    ):
        before = len(server.compressed())
        output, usage = complete(client, messages, stream=stream)
        assert output == compressed
        (line,) = server.compressed()[before:]
        report = compression_of(usage)
        block_bytes.add(report.pop("kept_bytes") / line.blocks_after)
        block_bytes.add(report.pop("uncompressed_bytes") / line.blocks_before)
        assert report == {
            "method": "cake",
            "budget": 0.3,
            "packed_dtype": "auto",
            "prompt_tokens": usage.prompt_tokens,
            "kept_tokens": line.kept_tokens,
            "layer_tokens": list(line.layer_tokens),
        }
        assert line.kept_tokens == pytest.approx(0.3 * usage.prompt_tokens, abs=BLOCK)
        assert line.blocks_before == -(-usage.prompt_tokens // BLOCK) > 2 * line.blocks_after
        assert usage.prompt_tokens_details.multimodal_tokens == {"image": image_tokens}
        for uncompressed in ({"kv_compress": "off"}, {"kv_budget": 1.0}):
            output, usage = complete(client, messages, uncompressed, stream)
            assert (output, compression_of(usage)) == (uncompressed_output, None)
        assert len(server.compressed()) == before + 1
    assert len(block_bytes) == 1


def test_images_can_be_protected(client):
    start = len(["<|im_start|>", *"user\n", "<|vision_start|>"])
    end = start + IMAGE_TOKENS
    second_start = end + len(["<|vision_end|>", *TEXT, "<|vision_start|>"])
    image_range = f"{start}:{end}"
    protected_ranges = [
        image_range,
        image_range,
        f"{image_range},{second_start}:{second_start + SMALL_IMAGE_TOKENS}",
    ]
    for (messages, image_tokens), protected in zip(CHATS, protected_ranges, strict=True):
        _, usage = complete(client, messages, {"kv_protect": protected})
        assert compression_of(usage)["protected_tokens"] == image_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "xargs", "message"),
    [
        (
            PICTURE_CHAT,
            {"kv_protect": "question"},
            "question .* its messages contain more than text",
        ),
        (
            chat(*PICTURE_CHAT[0]["content"], system="Never say orange."),
            {"kv_protect": "system"},
            "system .* a message of the chat contains more than text",
        ),
        (chat(VIDEO, text()), {}, "contains videos, which is not tested; send it with kv_compress"),
        (
            chat(image(8), VIDEO, text()),
            {},
            "compressed only with text and images, .* contains videos",
        ),
        (PICTURE_CHAT, {"kv_budget": 2.5}, "kv_budget must be a ratio"),
    ],
    ids=["question", "system", "video", "picture and video", "budget"],
)
def test_refused_chats_get_a_400(stream, messages, xargs, message, server, client):
    name = "vllm:kv_compress_refused_requests_total"
    before, compressed_before = server.metric(name), len(server.compressed())
    with pytest.raises(BadRequestError, match=message):
        complete(client, messages, xargs, stream)
    assert server.metric(name) == before + 1
    if VIDEO in messages[-1]["content"]:
        output, usage = complete(client, messages, {"kv_compress": "off"}, stream)
        assert len(output) == NEW
        assert usage.prompt_tokens_details.multimodal_tokens["video"] > 0
    assert len(server.compressed()) == compressed_before


def test_a_refused_chat_does_not_evict_cached_pictures(client, local_outputs):
    """The picture stays cached whether the refused chat sent it or named it by its uuid."""
    named = chat(image(1, uuid="lamp"), text())
    by_uuid = chat({"type": "image_url", "image_url": None, "uuid": "lamp"}, text())
    refused = pytest.raises(BadRequestError, match="question cannot be found")
    for messages in (named, named, by_uuid, by_uuid):
        with refused:
            complete(client, messages, {"kv_protect": "question"})
        assert complete(client, messages)[0] == local_outputs[0][0]


def test_every_endpoint_with_images_compresses_them(server, client, local_outputs):
    (compressed, _), (messages, _) = local_outputs[0], CHATS[0]
    common = {"model": "demo", "messages": messages, "max_tokens": 16, "temperature": 0}

    def post(path, **body):
        before = len(server.compressed())
        response = httpx.post(f"{server.url}{path}", json=body, timeout=300)
        assert response.status_code == 200, response.text
        return response.json(), server.compressed()[before:]

    response, (line,) = post("/v1/chat/completions", **common)
    expected = response["choices"][0]["message"]["content"]
    batch, lines = post("/v1/chat/completions/batch", **common | {"messages": [messages] * 2})
    assert [choice["message"]["content"] for choice in batch["choices"]] == [expected] * 2
    assert (
        compression_report(batch)["kept_tokens"]
        == 2 * line.kept_tokens
        == sum(x.kept_tokens for x in lines)
    )
    data = PICTURE_CHAT[0]["content"][0]["image_url"]["url"].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, text()]
    message, lines = post("/v1/messages", **common | {"messages": chat(*content)})
    assert message["content"][0]["text"] == expected
    assert lines[0].kept_tokens == line.kept_tokens
    sampling = {"max_tokens": NEW, "ignore_eos": True}
    request, _ = post("/v1/chat/completions/render", **common | sampling)
    full, lines = post("/inference/v1/generate", **request)
    assert full["choices"][0]["token_ids"] == compressed
    assert compression_report(full)["kept_tokens"] == line.kept_tokens == lines[0].kept_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_endpoint_accepts_images(stream, client):
    (picture, words) = PICTURE_CHAT[0]["content"]
    image_part = {"type": "input_image", "image_url": picture["image_url"]["url"], "detail": "auto"}
    messages = [{"role": "user", "content": [image_part, {**words, "type": "input_text"}]}]
    response = client.responses.create(
        model="demo", input=messages, max_output_tokens=16, temperature=0, stream=stream,
    )  # fmt: skip
    if stream:
        response = list(response)[-1].response
    expected = client.chat.completions.create(
        model="demo", messages=PICTURE_CHAT, max_tokens=16, temperature=0,
    )  # fmt: skip
    assert response.output_text == expected.choices[0].message.content
    assert response.usage.input_tokens_details.kv_compress == compression_of(expected.usage)
    assert compression_of(expected.usage)["prompt_tokens"] > IMAGE_TOKENS


def test_concurrent_requests_and_a_disconnect_change_no_output_and_blocks_return(
    server, client, local_outputs
):
    def stream_and_disconnect():
        body = {"ignore_eos": True}
        with client.chat.completions.create(
            model="demo", messages=PICTURE_CHAT, max_tokens=400, stream=True, extra_body=body
        ) as events:
            next(iter(events))

    with ThreadPoolExecutor(10) as pool:
        disconnect = pool.submit(stream_and_disconnect)
        requests = [CHATS[number % len(CHATS)][0] for number in range(9)]
        outputs = list(
            pool.map(lambda messages: complete(client, messages, stream=True)[0], requests)
        )
        disconnect.result()
    assert outputs == [compressed for compressed, _ in local_outputs] * 3
    wait_for(lambda: idle(server))
    planned = server.metric("vllm:kv_compress_planned_requests_total")
    compressed = {line.request for line in server.compressed()}  # a preempted request appears twice
    assert planned == server.metric("vllm:kv_compress_requests_total") == len(compressed)
