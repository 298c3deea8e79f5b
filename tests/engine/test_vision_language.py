"""Vision-language models: image tokens are compressed like text tokens.

Their keys are cached with M-RoPE positions. As in `test_reference`, kept tokens are compared with
the methods in float64; here the prompt contains an image.
"""

from itertools import pairwise
from string import ascii_lowercase

import pytest
import torch

from configuring import configure
from engines import BLOCK, V2, engine, model_runner_v1_only, settings
from test_reference import WINDOW, assert_equals_reference, packed
from vision_checkpoints import FAMILIES, ID, PICTURE, make, picture, without_videos
from vllm_kvcompress.engine.frontend import modalities
from vllm_kvcompress.engine.messages.options import options_of
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

# the mixture-of-experts model differs from these only after attention
NAMES = ["qwen3-vl"] if V2 else ["qwen2.5-vl", "qwen3-vl"]
IMAGE = ID["<|image_pad|>"]
NEW = 12
COLUMNS, ROWS = 12, 10
TEXT = "The lamp is blue, the door is red, and nobody knows who painted them so. "
OPTIONS = dict(
    skip_tokenizer_init=False,
    max_model_len=1024,
    max_num_seqs=8,
    limit_mm_per_prompt={"video": 0},
)
OFF = {"kv_compress": "off"}
PIECES = dict(max_whole=640, piece=256, probe=16)
# output tokens that are recomputed after a preemption must not include an image token
LETTERS = {"allowed_token_ids": [ID[letter] for letter in ascii_lowercase]}

pytestmark = pytest.mark.usefixtures(without_videos.__name__)


def image_prompt(seed=1, repeats=5, before="Look at this: "):
    return {
        "prompt": f"{before}{PICTURE} {TEXT * repeats}",
        "multi_modal_data": {"image": picture(COLUMNS, ROWS, seed)},
    }


def two_image_prompt(repeats=3):
    """Return a prompt with two images of different shapes and text between them."""
    shown = [picture(COLUMNS, ROWS, 4), picture(6, 9, 5)]
    return {
        "prompt": f"Look: {PICTURE} {TEXT} Or at this: {PICTURE} {TEXT * repeats}",
        "multi_modal_data": {"image": shown},
    }


PROMPTS = [
    image_prompt(1),
    image_prompt(2),
    image_prompt(1, repeats=3),
    image_prompt(3, before=TEXT * 2),
    two_image_prompt(),
]
LONG, PREEMPTING = 80, 200  # output tokens with a look-ahead, and with preemptions
if V2:  # in Triton's interpreter
    PROMPTS, LONG, PREEMPTING = PROMPTS[:3], 24, 24


def sampling(tokens=NEW, **more):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def outputs(llm, prompts, tokens=NEW, **more):
    return llm.llm.generate(prompts, sampling(tokens, **more), use_tqdm=False)


def output_tokens(llm, prompts, tokens=NEW, **more):
    return [list(o.outputs[0].token_ids) for o in outputs(llm, prompts, tokens, **more)]


def single_output(llm, prompt, tokens=NEW, **more):
    """Return the output for a prompt that is rendered when its request is created."""
    llm.llm.llm_engine.add_request("raw", prompt, sampling(tokens, **more))
    return llm.drain()["raw"]


def as_tokens(llm, prompt):
    """Return the same prompt as token ids, with one placeholder per image."""
    ids = llm.llm.get_tokenizer().encode(prompt["prompt"], add_special_tokens=False)
    return {"prompt_token_ids": ids, "multi_modal_data": prompt["multi_modal_data"]}


@pytest.mark.parametrize(
    ("method", "prompt"),
    [
        pytest.param("cake", image_prompt(), marks=model_runner_v1_only),
        ("snapkv", two_image_prompt()),
    ],
    ids=["cake", "snapkv, two pictures"],
)
@pytest.mark.parametrize("name", NAMES if V2 else FAMILIES)
def test_pages_contain_the_tokens_that_the_method_selects(name, method, prompt, checkpoints_folder):
    """Chunks of 150 tokens end within the image, whose M-RoPE positions do not count tokens.

    The output continues at the positions that it has without compression: the first layer's queries
    and keys depend only on a token and its position, and the first output token is the same.
    """
    config = settings(method, 0.3, window=WINDOW, allow_override="off")
    with engine(
        make(name, checkpoints_folder),
        additional_config=config,
        enable_prefix_caching=False,
        max_num_batched_tokens=150,
        **OPTIONS,
    ) as llm:
        uncompressed_seen, free = llm.record_attention(), llm.free_blocks
        expected = single_output(llm, prompt, 2, extra_args=OFF)
        uncompressed = {part: torch.cat(uncompressed_seen[0][part]) for part in "qk"}
        seen = llm.record_attention()
        llm.llm.llm_engine.add_request("r", prompt, sampling(8))
        counts, placeholders = packed(llm)
        (request,) = llm.running()
        tokens = request.num_prompt_tokens
        pictures = [at for at, token in enumerate(request.prompt_token_ids) if token == IMAGE]
        assert COLUMNS * ROWS <= len(pictures) < tokens - WINDOW
        assert len(uncompressed["q"]) == tokens + 1
        assert free - llm.free_blocks < tokens // BLOCK
        (answer,) = llm.drain().values()
        assert llm.free_blocks == free
    assert answer[0] == expected[0]
    for part, rows in uncompressed.items():
        assert torch.equal(torch.cat(seen[0][part])[tokens], rows[tokens])
    family = FAMILIES[name]
    parsed = CompressionConfig.parse(config["kvcompress"])
    assert_equals_reference(parsed, seen, counts, placeholders, family, tokens)


@pytest.fixture(scope="module", params=NAMES)
def alone(request, checkpoints_folder):
    """Return a model, vLLM's own outputs, and the compressed outputs of single requests."""
    model, config = make(request.param, checkpoints_folder), settings("cake", 0.3)
    with engine(model, **OPTIONS) as llm:
        plain = output_tokens(llm, PROMPTS)
    with engine(model, additional_config=config, enable_prefix_caching=False, **OPTIONS) as llm:
        return model, plain, [output_tokens(llm, [each])[0] for each in PROMPTS]


def test_uncompressed_outputs_match_vllm_and_compressed_ones_match_the_first_token(alone):
    model, plain, expected = alone
    assert [answer[0] for answer in expected] == [answer[0] for answer in plain]
    assert expected != plain
    config = settings("cake", 0.3, allow_override="all")
    with engine(model, additional_config=config, **OPTIONS) as llm:
        for ask in ({"kv_budget": 1.0}, {"kv_compress": "off"}):
            assert output_tokens(llm, PROMPTS, extra_args=ask) == plain
        assert output_tokens(llm, PROMPTS) == expected
        other_outputs = output_tokens(
            llm, PROMPTS, extra_args={"kv_compress": "h2o", "kv_budget": 0.2}
        )
        assert other_outputs not in (plain, expected)


@pytest.mark.parametrize(
    "more",
    [pytest.param({}, marks=model_runner_v1_only), {"max_num_batched_tokens": 96}],
    ids=["batch", "chunks"],
)
def test_trap_21_outputs_depend_only_on_the_requests_own_image(more, alone):
    """The prefix cache does not mix up blocks of different images, in either order."""
    model, _, expected = alone
    config = settings("cake", 0.3)
    with engine(model, additional_config=config, **{**OPTIONS, **more}) as llm:
        free = llm.free_blocks
        assert output_tokens(llm, PROMPTS) == expected
        again = outputs(llm, PROMPTS[::-1])
        assert [list(o.outputs[0].token_ids) for o in again] == expected[::-1]
        # the image and more were cached, and the method's window was computed
        assert all(o.num_cached_tokens > COLUMNS * ROWS for o in again)
        (other,) = outputs(llm, [image_prompt(9)])
        assert other.num_cached_tokens <= BLOCK
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free


def test_preempted_image_requests_continue_and_free_their_blocks(alone):
    model = alone[0]
    config = settings("cake", 0.3)
    small = {**OPTIONS, "max_model_len": 768, "enable_prefix_caching": False}
    with engine(model, additional_config=config, blocks=1 + (60 if V2 else 25), **small) as llm:
        free, cuts, steps = llm.free_blocks, llm.watch_preemptions(), []
        step = llm.llm.llm_engine.step

        def stepping():
            """Run a step; on V2, preempt all requests once, because its steps are slow."""
            steps.append(1)
            if V2 and len(steps) == 12:
                assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
            return step()

        llm.llm.llm_engine.step = stepping
        got = output_tokens(llm, PROMPTS, PREEMPTING, **LETTERS)
        assert cuts
        assert llm.free_blocks == free
    # From each preemption on, the output is that of a prompt with the output so far.
    with engine(model, additional_config=config, **small) as llm:
        prompts, params, expected = [], [], []
        for number, answer in enumerate(got):
            raw = as_tokens(llm, PROMPTS[number])
            for start, stop in pairwise([0, *cuts.get(str(number), []), len(answer)]):
                ids = raw["prompt_token_ids"] + answer[:start]
                prompts += [{**raw, "prompt_token_ids": ids}] * (stop > start)
                params += [sampling(stop - start, **LETTERS)] * (stop > start)
                expected += [answer[start:stop]] * (stop > start)
        again = llm.llm.generate(prompts, params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in again] == expected


@pytest.mark.parametrize(
    "more",
    [
        {"lookahead": 16},
        pytest.param({"decode_budget": 128, "decode_interval": BLOCK}, marks=model_runner_v1_only),
    ],
    ids=["lookahead", "decode-budget"],
)
def test_lookahead_outputs_do_not_depend_on_concurrent_requests(more, alone):
    model, plain, _ = alone
    config = settings("cake", 0.3, **more)
    with engine(model, additional_config=config, **OPTIONS) as llm:
        free, repacked = llm.free_blocks, llm.watch_repacking()
        expected = [output_tokens(llm, [each], LONG)[0] for each in PROMPTS]
        assert llm.compressor.compressed == len(PROMPTS)
        assert output_tokens(llm, PROMPTS, LONG) == expected
        assert [answer[0] for answer in expected] == [answer[0] for answer in plain]
        if "lookahead" in more:  # the prompt stayed uncompressed until then
            assert [a[:NEW] for a in expected] == plain
        else:
            assert repacked
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free


def render(llm, prompt):
    """Return the prompt as vLLM's server renders it, bypassing the cache of images."""
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    renderer = llm.llm.renderer
    parsed = parse_model_prompt(llm.llm.model_config, prompt)
    tokenizing = renderer.default_cmpl_tok_params
    return renderer.render_cmpl([parsed], tokenizing, skip_mm_cache=True)[0]


@model_runner_v1_only
@pytest.mark.parametrize(
    ("option", "reason", "flag"),
    [
        ({"enable_mm_embeds": True}, "not tested together", "--enable-mm-embeds"),
        ({"video_pruning_rate": 0.5}, "not tested together", "--video-pruning-rate"),
        (
            {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}},
            "not tested together",
            "--ec-transfer-config",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_image_processing_is_refused_at_startup(
    option, reason, flag, checkpoints_folder
):
    model = make("qwen3-vl", checkpoints_folder)
    with pytest.raises((ConfigError, ValueError), match=reason) as refusal:
        configure(model, **option)
    assert f"remove {flag}" in str(refusal.value)
    configure(model, additional_config={}, **option)


@model_runner_v1_only
def test_untested_modalities_are_refused_unless_uncompressed(alone, monkeypatch):
    """Videos, and images on other models, are refused before the request runs."""
    from vllm.exceptions import VLLMValidationError
    from vllm.multimodal.inputs import PlaceholderRange

    model, plain, expected = alone
    config = settings("cake", 0.3, allow_override="off")
    with engine(model, additional_config=config, **OPTIONS) as llm:
        process = llm.llm.llm_engine.input_processor.process_inputs
        video = {
            "type": "multimodal",
            "prompt_token_ids": [ID["<|video_pad|>"]] * 300,
            "mm_placeholders": {"video": [PlaceholderRange(offset=0, length=300)]},
            "mm_hashes": {"video": ["of a video"]},
            "mm_kwargs": {"video": [None]},
        }
        refused = pytest.raises(VLLMValidationError, match="contains videos, which is not tested")
        with refused as refusal:
            process("v", video, sampling(), supported_tasks=("generate",))
        assert "are compressed only with text and images" in str(refusal.value)
        empty = render(llm, PROMPTS[0])
        for nothing in ([], None):
            placeholders = {**empty["mm_placeholders"], "video": nothing}
            assert modalities.modalities_of({"mm_placeholders": placeholders}) == {"image"}
        empty["mm_placeholders"]["video"] = []
        assert single_output(llm, empty) == expected[0]
        # spans also count the image's placeholder tokens
        raw, asks = as_tokens(llm, image_prompt(9)), {"kv_protect": "450:460"}
        assert len(raw["prompt_token_ids"]) < 450
        parsed = process("s", raw, sampling(extra_args=asks), supported_tasks=("generate",))
        options = options_of(llm.worker.settings, parsed.sampling_params)
        assert options.spans == ((450, 460),)
        message = llm.scheduler.vllm_config
        assert modalities.warning_of(message) is None  # it takes no videos
        monkeypatch.setattr(modalities, "MODALITIES", {})
        assert "with anything but text were not tested" in modalities.warning_of(message)
        short = image_prompt(1, repeats=1)
        lengths = [len(p["prompt_token_ids"]) for p in (as_tokens(llm, short), render(llm, short))]
        assert lengths[0] < 128 < lengths[1]
        for prompt in (PROMPTS[0], short, as_tokens(llm, short)):
            with pytest.raises(
                VLLMValidationError, match=r"are compressed only with text, .* images"
            ):
                output_tokens(llm, [prompt])
            with pytest.raises(
                VLLMValidationError, match=r"are compressed only with text, .* images"
            ):
                single_output(llm, prompt)
        assert output_tokens(llm, PROMPTS[:1], extra_args=OFF) == plain[:1]
        # this prompt always stays uncompressed
        small = {"prompt": PICTURE + TEXT, "multi_modal_data": {"image": picture(2, 2, 1)}}
        assert output_tokens(llm, [small])[0] == single_output(llm, small)
        assert llm.compressor.compressed == 1
        assert not llm.llm.llm_engine.has_unfinished_requests()


@model_runner_v1_only
def test_max_whole_allows_images_in_prompts_that_are_not_in_pieces(alone):
    """The length includes the image's placeholder tokens, however the prompt is sent."""
    from vllm.exceptions import VLLMValidationError

    model, plain, _ = alone
    config = settings("cake", 0.3, allow_override="off", **PIECES)
    with engine(model, additional_config=config, **OPTIONS) as llm:
        raw = as_tokens(llm, PROMPTS[0])
        length = len(render(llm, PROMPTS[0])["prompt_token_ids"])
        assert len(raw["prompt_token_ids"]) + 200 < 640 < length + 200
        message = (
            f"has {length} tokens, up to {length + 200} with its output, and --kv-max-whole is"
        )
        for ask in (lambda p, n: output_tokens(llm, [p], n), lambda p, n: single_output(llm, p, n)):
            for prompt in (PROMPTS[0], raw):
                with pytest.raises(VLLMValidationError, match=message) as refusal:
                    ask(prompt, 200)
                assert "lower max_tokens" in str(refusal.value)
            with pytest.raises(VLLMValidationError, match="up to 1024 with its output"):
                ask(raw, None)
            with pytest.raises(VLLMValidationError, match="640; send a shorter prompt, or"):
                ask(image_prompt(repeats=8), 1)
        assert not llm.llm.llm_engine.has_unfinished_requests()
        assert output_tokens(llm, PROMPTS[:1], extra_args=OFF) == plain[:1]
        assert single_output(llm, raw, extra_args=OFF) == plain[0]
        # with its output it has fewer than 640 tokens
        assert output_tokens(llm, PROMPTS[:1])[0][0] == single_output(llm, raw)[0] == plain[0][0]


@model_runner_v1_only
def test_a_refused_prompt_leaves_other_prompts_items_in_the_cache(alone):
    """Its own image is sent again with the next request; items of other prompts stay cached."""
    from vllm.exceptions import VLLMValidationError

    model, plain, _ = alone
    config = settings("cake", 0.3, allow_override="off", **PIECES)
    with engine(model, additional_config=config, **OPTIONS) as llm:
        cache = llm.llm.renderer.mm_processor_cache
        own, other = (render(llm, each)["mm_hashes"]["image"][0] for each in PROMPTS[:2])
        for refuse in (output_tokens, lambda llm, prompts, n: single_output(llm, prompts[0], n)):
            llm.llm.llm_engine.reset_mm_cache()
            assert output_tokens(llm, PROMPTS[1:2], extra_args=OFF) == plain[1:2]
            with pytest.raises(VLLMValidationError, match="piece by piece"):
                refuse(llm, PROMPTS[:1], 200)
            assert cache.is_cached([own, other]) == [False, True]
            assert output_tokens(llm, PROMPTS[:2], extra_args=OFF) == plain[:2]
            assert cache.is_cached([own, other]) == [True, True]
            # the engine has it, so a request that refers to it without data is not refused
            with pytest.raises(VLLMValidationError, match="piece by piece"):
                refuse(llm, PROMPTS[:1], 200)
            assert cache.is_cached([own, other]) == [True, True]
            assert output_tokens(llm, PROMPTS[:1], extra_args=OFF) == plain[:1]


@model_runner_v1_only
def test_beam_search_with_images_is_refused_with_pieces(alone):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMValidationError

    from vllm_kvcompress.engine.frontend import api
    from vllm_kvcompress.engine.messages.settings import active_settings

    def check(llm, *parts):
        said = [{"role": "user", "content": list(parts)}]
        request = ChatCompletionRequest(messages=said, use_beam_search=True, n=2)
        processor = llm.llm.llm_engine.input_processor
        engine_settings = active_settings(processor.vllm_config.additional_config)
        options = RequestOptions.parse(engine_settings, None)
        with api._refusals(processor):
            api._check_beams(engine_settings, options, request, chat=True)

    text = {"type": "text", "text": "What is this?"}
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with engine(alone[0], additional_config=settings("cake", 0.3, **PIECES), **OPTIONS) as llm:
        check(llm, text)
        with pytest.raises(VLLMValidationError, match="without use_beam_search"):
            check(llm, shown, text)
    with engine(alone[0], additional_config=settings("cake", 0.3), **OPTIONS) as llm:
        check(llm, shown, text)


@model_runner_v1_only
def test_packed_pages_of_a_picture_are_reused_for_this_picture_alone(checkpoints_folder):
    config = settings("cake", 1.0, packed_dtype="k4v3", reuse="grid")
    first_cell = BLOCK + 512
    long = {"max_model_len": 2048, "max_num_batched_tokens": 256, "additional_config": config}
    with engine(make("qwen3-vl-d64", checkpoints_folder), **OPTIONS | long) as llm:
        free = llm.free_blocks
        prompts = [image_prompt(seed, repeats=9) for seed in (1, 2, 1)]
        (first, other, warm) = [outputs(llm, [prompt])[0] for prompt in prompts]
        assert first.prompt_token_ids == other.prompt_token_ids
        assert [each.num_cached_tokens > first_cell for each in (first, other, warm)] == [0, 0, 1]
        assert warm.outputs[0].token_ids == first.outputs[0].token_ids
        assert llm.free_blocks == free
