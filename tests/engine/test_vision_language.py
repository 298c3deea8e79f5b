"""Vision-language models: a picture's tokens are compressed as any others.

Their positions are M-RoPE's, which keys carry when they are cached. `test_reference` says how what
is kept is held against the methods in float64; here a picture is among what was asked.
"""

from itertools import pairwise
from string import ascii_lowercase

import pytest
import torch

from configuring import configure
from engines import BLOCK, V2, engine, first_runner, settings
from test_reference import WINDOW, equals_the_reference, packed
from vision_checkpoints import FAMILIES, ID, PICTURE, make, picture, without_videos
from vllm_kvcompress.engine.frontend import modalities
from vllm_kvcompress.engine.messages.spans import spans_of
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.config import CompressionConfig

# the mixture differs from these in no more than what is behind attention
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
# an answer that is prefilled after a preemption must show no picture
LETTERS = {"allowed_token_ids": [ID[letter] for letter in ascii_lowercase]}

pytestmark = pytest.mark.usefixtures(without_videos.__name__)


def asked(seed=1, repeats=5, before="Look at this: "):
    return {
        "prompt": f"{before}{PICTURE} {TEXT * repeats}",
        "multi_modal_data": {"image": picture(COLUMNS, ROWS, seed)},
    }


def asked_of_two(repeats=3):
    """Pictures of two shapes, with text between them."""
    shown = [picture(COLUMNS, ROWS, 4), picture(6, 9, 5)]
    return {
        "prompt": f"Look: {PICTURE} {TEXT} Or at this: {PICTURE} {TEXT * repeats}",
        "multi_modal_data": {"image": shown},
    }


ASKED = [asked(1), asked(2), asked(1, repeats=3), asked(3, before=TEXT * 2), asked_of_two()]
LONG, PREEMPTING = 80, 200  # tokens of answers that are judged by themselves, or preempted
if V2:  # in Triton's interpreter
    ASKED, LONG, PREEMPTING = ASKED[:3], 48, 136


def sampling(tokens=NEW, **more):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def outputs(llm, prompts, tokens=NEW, **more):
    return llm.llm.generate(prompts, sampling(tokens, **more), use_tqdm=False)


def answers(llm, prompts, tokens=NEW, **more):
    return [list(o.outputs[0].token_ids) for o in outputs(llm, prompts, tokens, **more)]


def answered(llm, prompt, tokens=NEW, **more):
    """The answer to a prompt that is rendered where a request is made of it."""
    llm.llm.llm_engine.add_request("raw", prompt, sampling(tokens, **more))
    return llm.drain()["raw"]


def as_tokens(llm, prompt):
    """The same prompt by its token ids, in which a picture is one yet."""
    ids = llm.llm.get_tokenizer().encode(prompt["prompt"], add_special_tokens=False)
    return {"prompt_token_ids": ids, "multi_modal_data": prompt["multi_modal_data"]}


@pytest.mark.parametrize(
    ("method", "prompt"),
    [("cake", asked()), ("snapkv", asked_of_two())],
    ids=["cake", "snapkv, two pictures"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_pages_hold_what_the_method_says(name, method, prompt, checkpoints_folder):
    """Chunks of 150 end within the picture; positions are its own, which no count gives.

    An answer goes on at the positions that it has without compression: the first layer's queries
    and keys depend on a token and its position alone, and the first token is the same.
    """
    config = settings(method, 0.3, window=WINDOW, allow_override="off")
    with engine(
        make(name, checkpoints_folder),
        additional_config=config,
        enable_prefix_caching=False,
        max_num_batched_tokens=150,
        **OPTIONS,
    ) as llm:
        left_whole, free = llm.record_attention(), llm.free_blocks
        want = answered(llm, prompt, 2, extra_args=OFF)
        whole = {part: torch.cat(left_whole[0][part]) for part in "qk"}
        seen = llm.record_attention()
        llm.llm.llm_engine.add_request("r", prompt, sampling(8))
        counts, held = packed(llm)
        (request,) = llm.running()
        tokens = request.num_prompt_tokens
        pictures = [at for at, token in enumerate(request.prompt_token_ids) if token == IMAGE]
        assert COLUMNS * ROWS <= len(pictures) < tokens - WINDOW
        assert len(whole["q"]) == tokens + 1
        assert free - llm.free_blocks < tokens // BLOCK
        (answer,) = llm.drain().values()
        assert llm.free_blocks == free
    assert answer[0] == want[0]
    for part, rows in whole.items():
        assert torch.equal(torch.cat(seen[0][part])[tokens], rows[tokens])
    family = FAMILIES[name]
    made = CompressionConfig.parse(config["kvcompress"])
    equals_the_reference(made, seen, counts, held, family, tokens)


@pytest.fixture(scope="module", params=NAMES)
def alone(request, checkpoints_folder):
    """A model, vLLM's own answers, and each compressed answer by itself."""
    model, config = make(request.param, checkpoints_folder), settings("cake", 0.3)
    with engine(model, **OPTIONS) as llm:
        plain = answers(llm, ASKED)
    with engine(model, additional_config=config, enable_prefix_caching=False, **OPTIONS) as llm:
        return model, plain, [answers(llm, [each])[0] for each in ASKED]


def test_whole_it_is_vllms_own_and_compressed_the_first_token_is(alone):
    model, plain, want = alone
    assert [answer[0] for answer in want] == [answer[0] for answer in plain]
    assert want != plain
    config = settings("cake", 0.3, allow_override="all")
    with engine(model, additional_config=config, **OPTIONS) as llm:
        for ask in ({"kv_budget": 1.0}, {"kv_compress": "off"}):
            assert answers(llm, ASKED, extra_args=ask) == plain
        assert answers(llm, ASKED) == want
        others = answers(llm, ASKED, extra_args={"kv_compress": "h2o", "kv_budget": 0.2})
        assert others not in (plain, want)


@pytest.mark.parametrize("more", [{}, {"max_num_batched_tokens": 96}], ids=["batch", "chunks"])
def test_trap_21_an_answer_depends_on_its_own_picture(more, alone):
    """The prefix cache gives a picture's blocks to nobody who shows another, in either order."""
    model, _, want = alone
    config = settings("cake", 0.3)
    with engine(model, additional_config=config, **{**OPTIONS, **more}) as llm:
        free = llm.free_blocks
        assert answers(llm, ASKED) == want
        again = outputs(llm, ASKED[::-1])
        assert [list(o.outputs[0].token_ids) for o in again] == want[::-1]
        # the picture and more were found, and a method's window was computed
        assert all(o.num_cached_tokens > COLUMNS * ROWS for o in again)
        (other,) = outputs(llm, [asked(9)])
        assert other.num_cached_tokens <= BLOCK
        llm.settle()
        assert llm.free_blocks == free


def goes_on_as_alone(llm, prompt, answer, cuts):
    """Assert that `answer` is this prompt's, alone in this engine, as `Engine.alone` does.

    From each of `cuts` on it is that of a request which prefills the prompt and what was answered.
    """
    raw = as_tokens(llm, prompt)
    for start, stop in pairwise([0, *cuts, len(answer)]):
        again = {**raw, "prompt_token_ids": raw["prompt_token_ids"] + answer[:start]}
        if stop > start:
            assert answers(llm, [again], stop - start, **LETTERS) == [answer[start:stop]]


def test_preempted_it_goes_on_and_every_block_returns(alone):
    model = alone[0]
    config = settings("cake", 0.3)
    small = {**OPTIONS, "max_model_len": 768, "enable_prefix_caching": False}
    with engine(model, additional_config=config, blocks=1 + 25, **small) as llm:
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        got = answers(llm, ASKED, PREEMPTING, **LETTERS)
        assert cuts
        for number, answer in enumerate(got):
            goes_on_as_alone(llm, ASKED[number], answer, cuts.get(str(number), []))
        assert llm.free_blocks == free


@pytest.mark.parametrize(
    "more",
    [{"lookahead": 16}, {"decode_budget": 128, "decode_interval": BLOCK}],
    ids=["lookahead", "decode-budget"],
)
def test_judged_by_its_answer_it_is_the_same_in_company(more, alone):
    model, plain, _ = alone
    config = settings("cake", 0.3, **more)
    with engine(model, additional_config=config, **OPTIONS) as llm:
        free, repacked = llm.free_blocks, llm.watch_repacking()
        want = [answers(llm, [each], LONG)[0] for each in ASKED]
        assert llm.compressor.compressed == len(ASKED)
        assert answers(llm, ASKED, LONG) == want
        assert [answer[0] for answer in want] == [answer[0] for answer in plain]
        if "lookahead" in more:  # its prompt stood whole
            assert [a[:NEW] for a in want] == plain
        else:
            assert repacked
        llm.settle()
        assert llm.free_blocks == free


def render(llm, prompt):
    """As vLLM's server has it when it makes a request of it, past the cache of pictures."""
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    renderer = llm.llm.renderer
    parsed = parse_model_prompt(llm.llm.model_config, prompt)
    tokenizing = renderer.default_cmpl_tok_params
    return renderer.render_cmpl([parsed], tokenizing, skip_mm_cache=True)[0]


@first_runner
@pytest.mark.parametrize(
    ("option", "reason", "flag"),
    [
        ({"enable_mm_embeds": True}, "come as embeddings", "--enable-mm-embeds"),
        ({"video_pruning_rate": 0.5}, "take another way", "--video-pruning-rate, got 0.5"),
        (
            {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}},
            "another server encodes",
            "--ec-transfer-config",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_images_that_are_not_processed_here_are_refused_at_the_start(
    option, reason, flag, checkpoints_folder
):
    model = make("qwen3-vl", checkpoints_folder)
    with pytest.raises((ConfigError, ValueError), match=reason) as refusal:
        configure(model, **option)
    assert f"remove {flag}" in str(refusal.value)
    configure(model, additional_config={}, **option)


@first_runner
def test_what_was_not_tested_is_refused_unless_it_is_left_whole(alone, monkeypatch):
    """By name and before it runs: videos, and pictures of other models."""
    from vllm.exceptions import VLLMValidationError
    from vllm.multimodal.inputs import PlaceholderRange

    model, plain, want = alone
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
        refused = pytest.raises(VLLMValidationError, match="holds videos, which was not tested")
        with refused as refusal:
            process("v", video, sampling(), supported_tasks=("generate",))
        assert "may hold only text and images where they are compressed" in str(refusal.value)
        empty = render(llm, ASKED[0])
        for nothing in ([], None):
            held = {**empty["mm_placeholders"], "video": nothing}
            assert modalities.held_beside_text({"mm_placeholders": held}) == {"image"}
        empty["mm_placeholders"]["video"] = []
        assert answered(llm, empty) == want[0]
        # spans, too, are of the prompt with its picture's tokens
        raw, asks = as_tokens(llm, asked(9)), {"kv_protect": "450:460"}
        assert len(raw["prompt_token_ids"]) < 450
        made = process("s", raw, sampling(extra_args=asks), supported_tasks=("generate",))
        assert spans_of(made.sampling_params) == ((450, 460),)
        told = llm.scheduler.vllm_config
        assert modalities.warning_of(told) is None  # it takes no videos
        monkeypatch.setattr(modalities, "TESTED", {})
        assert "with anything but text were not tested" in modalities.warning_of(told)
        short = asked(1, repeats=1)
        lengths = [len(p["prompt_token_ids"]) for p in (as_tokens(llm, short), render(llm, short))]
        assert lengths[0] < 128 < lengths[1]
        for prompt in (ASKED[0], short, as_tokens(llm, short)):
            with pytest.raises(VLLMValidationError, match=r"may hold only text where .* images"):
                answers(llm, [prompt])
            with pytest.raises(VLLMValidationError, match=r"may hold only text where .* images"):
                answered(llm, prompt)
        assert answers(llm, ASKED[:1], extra_args=OFF) == plain[:1]
        # nothing of this one is ever dropped
        small = {"prompt": PICTURE + TEXT, "multi_modal_data": {"image": picture(2, 2, 1)}}
        assert answers(llm, [small])[0] == answered(llm, small)
        assert llm.compressor.compressed == 1
        assert not llm.llm.llm_engine.has_unfinished_requests()


@first_runner
def test_with_max_whole_a_picture_is_served_while_its_prompt_stands_whole(alone):
    """Counted with the picture's tokens, whichever way a prompt comes."""
    from vllm.exceptions import VLLMValidationError

    model, plain, _ = alone
    config = settings("cake", 0.3, allow_override="off", **PIECES)
    with engine(model, additional_config=config, **OPTIONS) as llm:
        raw = as_tokens(llm, ASKED[0])
        length = len(render(llm, ASKED[0])["prompt_token_ids"])
        assert len(raw["prompt_token_ids"]) + 200 < 640 < length + 200
        told = f"has {length} tokens, up to {length + 200} with its answer, and --kv-max-whole is"
        for ask in (lambda p, n: answers(llm, [p], n), lambda p, n: answered(llm, p, n)):
            for prompt in (ASKED[0], raw):
                with pytest.raises(VLLMValidationError, match=told) as refusal:
                    ask(prompt, 200)
                assert "ask for a shorter answer" in str(refusal.value)
            with pytest.raises(VLLMValidationError, match="up to 1024 with its answer"):
                ask(raw, None)
            with pytest.raises(VLLMValidationError, match="640; send a shorter prompt, or"):
                ask(asked(repeats=8), 1)
        assert not llm.llm.llm_engine.has_unfinished_requests()
        assert answers(llm, ASKED[:1], extra_args=OFF) == plain[:1]
        assert answered(llm, raw, extra_args=OFF) == plain[0]
        # it has no 640 tokens with its answer
        assert answers(llm, ASKED[:1])[0][0] == answered(llm, raw)[0] == plain[0][0]


@first_runner
def test_a_refused_prompt_takes_nothing_of_anothers_from_the_cache(alone):
    """Its own picture is sent with the next request; those of other prompts stay where they are."""
    from vllm.exceptions import VLLMValidationError

    model, plain, _ = alone
    config = settings("cake", 0.3, allow_override="off", **PIECES)
    with engine(model, additional_config=config, **OPTIONS) as llm:
        cache = llm.llm.renderer.mm_processor_cache
        own, other = (render(llm, each)["mm_hashes"]["image"][0] for each in ASKED[:2])
        for refuse in (answers, lambda llm, prompts, n: answered(llm, prompts[0], n)):
            llm.llm.llm_engine.reset_mm_cache()
            assert answers(llm, ASKED[1:2], extra_args=OFF) == plain[1:2]
            with pytest.raises(VLLMValidationError, match="piece by piece"):
                refuse(llm, ASKED[:1], 200)
            assert cache.is_cached([own, other]) == [False, True]
            assert answers(llm, ASKED[:2], extra_args=OFF) == plain[:2]
            assert cache.is_cached([own, other]) == [True, True]
            # it is the engine's by now: whoever names it without sending it is not refused for this
            with pytest.raises(VLLMValidationError, match="piece by piece"):
                refuse(llm, ASKED[:1], 200)
            assert cache.is_cached([own, other]) == [True, True]
            assert answers(llm, ASKED[:1], extra_args=OFF) == plain[:1]


@first_runner
def test_beam_search_with_pictures_is_refused_where_its_prompts_may_be_packed(alone):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMValidationError

    from vllm_kvcompress.engine.frontend import api

    def beams(*parts):
        said = [{"role": "user", "content": list(parts)}]
        return ChatCompletionRequest(messages=said, use_beam_search=True, n=2)

    text = {"type": "text", "text": "What is this?"}
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with engine(alone[0], additional_config=settings("cake", 0.3, **PIECES), **OPTIONS) as llm:
        processor = llm.llm.llm_engine.input_processor
        api._check_beams(processor, beams(text), chat=True)
        with pytest.raises(VLLMValidationError, match="without use_beam_search"):
            api._check_beams(processor, beams(shown, text), chat=True)
    with engine(alone[0], additional_config=settings("cake", 0.3), **OPTIONS) as llm:
        processor = llm.llm.llm_engine.input_processor
        api._check_beams(processor, beams(shown, text), chat=True)
