"""Faults that users reported of other low-bit KV caches, looked for in packed pages (k4v3).

Each test names its report. Random models show what shapes and bookkeeping can break; the trained
demo model shows what quality can.
"""

import math
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, mean, stdev

import pytest
import torch
from hypothesis import Phase, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from checkpoints import WIDE, make, tokens
from engines import BLOCK, engine, model_runner_v1_only, settings
from group_replay import watch_added_groups
from kvcompress_kernels import k4v3
from recordings import forced_outputs, packed_bytes, prompt_inputs
from test_hybrids import checked_window_outputs, groups_of
from test_metrics import samples
from test_ngram import NGRAM, watch_drafts
from test_reference import assert_decode_reads_kept_tokens, packed_groups
from vllm_kvcompress.methods.page_plan import RECENT_TOKENS
from vllm_kvcompress.serving.text import english

pytestmark = model_runner_v1_only
MODEL = "llama-two-layers-d64"
PAGE = k4v3.page_tokens(BLOCK, 4)
SHORTEST_PACKED = BLOCK + PAGE + RECENT_TOKENS
OFF = {"kv_compress": "off"}
PACKED = {"packed_dtype": "k4v3", "allow_override": "all"}


def prop(max_examples):
    """Return hypothesis' settings for tests that run an engine."""
    phases = Phase.explicit, Phase.generate  # after a failure, the engine has requests left
    return hypothesis_settings(
        max_examples=max_examples, derandomize=True, deadline=None, phases=phases
    )


# -- sinks and sliding windows ---------------------------------------------------------------------
# These tests come first: only with its first engine does vLLM prepare for mixtures of experts.


def with_large_sinks(source, folder):
    """Write a checkpoint with smooth attention, of which sinks take a large part; return its path.

    Random queries and keys would otherwise attend to one token, whatever the sink.
    """
    for file in Path(source).iterdir():
        shutil.copy(file, folder)
    weights = load_file(folder / "model.safetensors")
    assert any(name.endswith("sinks") for name in weights)
    for name, weight in weights.items():
        if "q_proj" in name:
            weight *= 0.03
        elif name.endswith("sinks"):
            weight += 8.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def packed_end(num_tokens):
    """Return the tokens of a prompt before the first one that is not packed, if all are kept."""
    packable = num_tokens - BLOCK - RECENT_TOKENS
    return BLOCK + packable // PAGE * PAGE if packable >= PAGE else 0


def round_to_format(llm, request_id, num_tokens):
    """Replace tokens of an uncompressed prompt by what its groups in k4v3 would stand for.

    The first block, and the tokens that fill no page, stay as they are.
    """
    mover, pool = llm.compressor.packer.mover, llm.compressor.pool
    blocks = [block.block_id for block in llm.manager.req_to_blocks[request_id]]
    for layer in range(len(pool.layer_offset)):
        pages = pool.flat_ids(layer, torch.tensor(blocks[1 : packed_end(num_tokens) // BLOCK]))
        keys, values = mover.read(pages)
        exact = [keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)]
        groups = [part.unflatten(1, (-1, k4v3.GROUP)) for part in exact]
        rounded = k4v3.dequantise(k4v3.quantise(*groups, k4v3.GROUP))
        read = [part.flatten(1, 2).unflatten(1, (-1, BLOCK)).transpose(0, 1) for part in rounded]
        mover.keys[pages], mover.values[pages] = read[0].mT, read[1]


def test_a_model_with_sinks_predicts_the_same_token_up_to_the_loss_of_the_format(
    checkpoints_folder, tmp_path
):
    """llama-cpp-turboquant#305. The loss is that of an ordinary cache with rounded numbers.

    Where `auto` prefers its token by more than rounding moves two logits, the token is the same.
    """
    model = with_large_sinks(make("gpt-oss-d64", checkpoints_folder), tmp_path)
    config = settings("snapkv", 1.0, packed_dtype="k4v3", allow_override="off")
    prompt, text, seen = tokens(1100, seed=8), tokens(60, seed=9), {}
    with engine(
        model, additional_config=config, max_model_len=2048, enable_prefix_caching=False
    ) as llm:
        for kind, options in (("k4v3", {}), ("rounded", OFF), ("auto", OFF)):
            with forced_outputs(llm, {"r": text}) as logits:
                llm.submit("r", prompt, len(text), extra_args=options)
                llm.step()
                if kind == "rounded":
                    round_to_format(llm, llm.running()[0].request_id, len(prompt))
                llm.drain()
            seen[kind] = torch.stack(logits["r"]).double()
        assert llm.compressor.compressed == 1
    assert (seen["k4v3"] - seen["rounded"]).abs().max() < 1e-3
    loss = (seen["rounded"] - seen["auto"]).abs().amax(-1)
    assert loss[1:].min() > 0.01
    first, second = seen["auto"].topk(2).values.unbind(-1)
    decided = first - second > 2 * loss
    assert decided.sum() > len(text) // 2
    best = {kind: rows.argmax(-1) for kind, rows in seen.items()}
    assert torch.equal(best["k4v3"][decided], best["auto"][decided])


WINDOW = 384


@pytest.fixture(scope="module", params=["gpt-oss-d64", "mistral-windows-d64"])
def windowed(request, checkpoints_folder):
    """A model whose sliding window is longer than the shortest packed prompt, and its shape."""
    config = settings("snapkv", 1.0, packed_dtype="k4v3")
    with engine(
        make(request.param, checkpoints_folder),
        additional_config=config,
        hf_overrides={"sliding_window": WINDOW},
        max_model_len=1024,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
    ) as llm:
        yield llm, WIDE[request.param]


@prop(4)
@given(offset=st.integers(-BLOCK - 2, 2 * BLOCK + 2))
@example(offset=-1)
@example(offset=0)
@example(offset=1)
@example(offset=SHORTEST_PACKED - WINDOW)
def test_layers_read_their_window_and_packed_tokens_around_the_window(windowed, offset):
    """ik_llama.cpp#1205. The prompt is about as long as the window, and the output passes it."""
    (engine_, shape), prompt = windowed, tokens(WINDOW + offset, seed=WINDOW + offset)
    with engine_.lent() as llm:
        full = groups_of(llm).full
        seen = llm.record_attention(all_layers=True)
        llm.submit("r", prompt, BLOCK + 8)
        _, _, held = packed_groups(llm, 1)
        llm.drain()
    windows = {layer: parts for layer, parts in seen.items() if layer not in full}
    assert checked_window_outputs(shape, windows, WINDOW, every=7) > 100
    seen, shape = (
        {index: seen[layer] for index, layer in enumerate(full)},
        replace(shape, layers=len(full)),
    )
    first = prompt_inputs(seen, BLOCK, shape.head_dim)[1:]
    read = [
        [
            torch.cat([part[layer].double(), packed], 1)
            for part, packed in zip(first, parts, strict=True)
        ]
        for layer, parts in enumerate(held)
    ]
    unpacked_from = packed_end(len(prompt))
    assert_decode_reads_kept_tokens(seen, read, shape, len(prompt), unpacked_from)


def small_engine(checkpoints_folder, config, **options):
    """Return an engine of a model with two layers that caches no prefix."""
    defaults = {"max_model_len": 2048, "max_num_batched_tokens": 8192, "max_num_seqs": 8}
    return engine(
        make(MODEL, checkpoints_folder),
        additional_config=config,
        enable_prefix_caching=False,
        **defaults | options,
    )


@pytest.fixture(scope="module")
def small(checkpoints_folder):
    """An engine that packs outputs too. Its requests may choose their settings."""
    config = settings("cake", 0.5, **PACKED, decode_interval=PAGE)
    with small_engine(checkpoints_folder, config) as llm:
        yield llm


# -- requests side by side -------------------------------------------------------------------------


@prop(3)
@given(
    long=st.integers(700, 1500),
    few=st.integers(2, 6),
    short=st.integers(100, 280),
    past_page=st.integers(2, 40),
    budget=st.sampled_from([0.5, 1.0]),
)
def test_a_long_prompt_and_a_long_output_do_not_change_each_other(
    small, long, few, short, past_page, budget
):
    """jundot/omlx#2172. The output grows into blocks that the long prompt freed, and is packed."""
    many = SHORTEST_PACKED - short + past_page
    requests = {"long": (tokens(long, seed=long), few), "short": (tokens(short, seed=short), many)}
    options = {"extra_args": {"kv_budget": budget}}
    with small.lent() as llm:
        alone = {
            name: llm.generate([prompt], count, **options)[0]
            for name, (prompt, count) in requests.items()
        }
        cuts = llm.watch_preemptions()
        # The pool holds both prompts, and a block or two more for the packed one.
        for _ in llm.in_smaller_pools([-(-long // BLOCK) - (-short // BLOCK) + 4] * 2):
            for name, (prompt, count) in requests.items():
                llm.submit(name, prompt, count, **options)
            assert llm.drain() == alone
            requests = dict(reversed(requests.items()))
        assert not cuts


def packed_in_one_step(llm, prompts, packed, options):
    """Prefill all prompts in one step; return codes and outputs of those packed in k4v3.

    Args:
        prompts: token ids of the prompts.
        packed: indices of the prompts to pack; the others stay uncompressed.
        options: settings of the packed prompts.

    Returns:
        by index, the bytes of `packed_bytes`, and the output tokens.
    """
    llm.compressor.compressed = 0
    for index, prompt in enumerate(prompts):
        llm.submit(str(index), prompt, 8, extra_args=options if index in packed else OFF)
    llm.step()
    assert llm.compressor.compressed == len(packed)
    pool = llm.compressor.pool
    codes = {int(name.split("-")[0]): packed_bytes(llm, name) for name in pool._slots}
    outputs = llm.drain()
    return codes, {index: outputs[str(index)] for index in packed}


@prop(6)
@given(
    lengths=st.lists(st.integers(SHORTEST_PACKED, 1200), min_size=2, max_size=3),
    method=st.sampled_from(["cake", "snapkv", "pyramidkv"]),
    budget=st.sampled_from([0.3, 0.5, 1.0]),
)
def test_prompts_that_end_in_one_step_get_their_own_codes(small, lengths, method, budget):
    """KIVI#18. Bit for bit: the codes of each prompt, and the output that reads them.

    Alone, a prompt is packed in the same step, while the others stay uncompressed. So both runs
    compute the same matrix products, whose rounding may depend on the number of rows.
    """
    prompts = [tokens(length, seed=index) for index, length in enumerate(lengths)]
    options = {"kv_compress": method, "kv_budget": budget}
    with small.lent() as llm:
        codes, outputs = packed_in_one_step(llm, prompts, range(len(prompts)), options)
        assert len(codes) == len(prompts)
        for index, prompt in enumerate(prompts):
            alone_codes, alone_outputs = packed_in_one_step(llm, prompts, [index], options)
            for layer, content in enumerate(codes[index]):
                assert content.any()
                assert torch.equal(content, alone_codes[index][layer])
            assert outputs[index] == alone_outputs[index]
            assert llm.generate([prompt], 8, extra_args=options) == [outputs[index]]


# -- packed outputs --------------------------------------------------------------------------------

# With 80 output tokens, both fill a page behind their last packed one.
WHOLE, IN_PIECES = 500, 1290


def vllm_usage():
    """Return the share of the KV cache that vLLM reports as used."""
    families = REGISTRY.collect()
    every = [sample for family in families for sample in family.samples]
    (usage,) = (sample.value for sample in every if sample.name == "vllm:kv_cache_usage_perc")
    return usage


def groups_with_checked_blocks(llm, prompt, count):
    """Generate `count` tokens, and check after each step that all reports name the blocks held.

    Returns:
        the groups that were added, as `watch_added_groups` records them, and the output tokens.
    """
    cache = llm.scheduler.kv_cache_config
    block_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
    added, free, held_then = watch_added_groups(llm, llm.record_attention()), llm.free_blocks, []
    llm.submit("r", prompt, count)
    while not (finished := llm.step()):
        (request,), values = llm.running(), samples(engine="0")
        held = llm.num_blocks_held(request.request_id)
        freed = values["freed_blocks_total",] + values["freed_answer_blocks_total",]
        allocated = -(-request.num_computed_tokens // BLOCK) + values["packed_blocks_total",]
        assert held == free - llm.free_blocks == allocated - freed
        assert vllm_usage() == pytest.approx(held / free)
        if llm.compressor.compressed:
            held_then.append(held)
    output = finished["r"]
    assert output.kv_compress["kept_bytes"] == held_then[0] * block_bytes
    assert values["repacked_answers_total",] > 0
    return added, list(output.outputs[0].token_ids)


@pytest.mark.parametrize("length", [WHOLE, IN_PIECES])
def test_packed_outputs_are_counted_and_do_not_depend_on_chunks(checkpoints_folder, length):
    """VeloxQuant-MLX#162. Blocks held, usage and metrics agree, and codes are the same."""
    config = settings(
        "cake", 1.0, packed_dtype="k4v3", max_whole=512, piece=96, decode_interval=PAGE, usage=True
    )
    prompt, runs = tokens(length, seed=length), []
    for chunk in (64, 8192):
        with small_engine(checkpoints_folder, config, max_num_batched_tokens=chunk) as llm:
            runs.append(groups_with_checked_blocks(llm, prompt, 80))
    (small, output), (large, expected) = runs
    assert output == expected
    where = [(each.computed, each.end, each.tokens) for each in small]
    assert where == [(each.computed, each.end, each.tokens) for each in large]
    for one, other in zip(small, large, strict=True):
        for name, part, expected_part in zip(
            one.groups._fields, one.groups, other.groups, strict=True
        ):
            assert_equal_up_to_rounding(name, part, expected_part)


def assert_equal_up_to_rounding(name, part, expected):
    """Assert that parts of groups are equal, except where rounding decides.

    The rounding of a matrix product may depend on its number of rows. It moves numbers between two
    steps to the next step.
    """
    if "codes" in name:
        difference = (part.int() - expected.int()).abs()
        assert difference.amax() <= 1
        assert difference.float().mean() < 1e-2
    else:
        torch.testing.assert_close(part, expected, rtol=2e-3, atol=1e-4)


# -- drafts ----------------------------------------------------------------------------------------

DRAFTED = [tokens(length, seed=length) for length in (417, 640, 90)]
DRAFTED_TOKENS = 80
TWO_TOKENS = {"allowed_token_ids": [5, 9]}
DRAFTED_OPTIONS = [{"kv_budget": budget} for budget in (0.5, 1.0)]


def repeated_4grams(output):
    """Return how many different runs of four tokens occur more than five times in an output."""
    runs = Counter(zip(*(output[start:] for start in range(4)), strict=False))
    return sum(count > 5 for count in runs.values())


@pytest.fixture(scope="module")
def outputs_without_drafts(small):
    """The outputs of `DRAFTED`, by settings."""
    with small.lent() as llm:
        return [
            llm.generate(DRAFTED, DRAFTED_TOKENS, extra_args=options, **TWO_TOKENS)
            for options in DRAFTED_OPTIONS
        ]


@pytest.mark.filterwarnings("ignore:(?s).*reflected list")  # from the compiler of V1's drafter
@pytest.mark.parametrize("num_drafts", [2, 4, 8])
def test_drafts_change_no_output_and_no_repetition(
    num_drafts, checkpoints_folder, outputs_without_drafts
):
    """vllm#40831 and vllm#52475. Outputs repeat themselves, so that many drafts are accepted."""
    speculative = {**NGRAM["speculative_config"], "num_speculative_tokens": num_drafts}
    config = settings("cake", 0.5, **PACKED)
    with small_engine(checkpoints_folder, config, speculative_config=speculative) as llm:
        free, drafts = llm.free_blocks, watch_drafts(llm)
        for options, expected in zip(DRAFTED_OPTIONS, outputs_without_drafts, strict=True):
            outputs = llm.generate(DRAFTED, DRAFTED_TOKENS, extra_args=options, **TWO_TOKENS)
            repetition = [sum(map(repeated_4grams, each)) for each in (outputs, expected)]
            assert repetition[1] > 0
            assert outputs == expected
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
        assert llm.compressor.compressed == 2 * len(DRAFTED_OPTIONS)
        assert 0 < drafts["accepted"] < drafts["verified"]


# -- the trained model -----------------------------------------------------------------------------

LONGEST = 1536
START, LENGTHS, SCORED = 1040, 64, 8


@pytest.fixture(scope="module")
def trained(demo_model):
    """The trained demo model, which packs every token of a prompt."""
    config = settings("snapkv", 1.0, packed_dtype="k4v3", allow_override="off")
    with engine(
        demo_model,
        additional_config=config,
        blocks=1 + 640,
        max_model_len=LONGEST,
        max_num_batched_tokens=LONGEST,
        max_num_seqs=LENGTHS + 16,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def text(tokenizer, trained):
    """The tokens of a text as long as the model allows. Its blocks are in the prefix cache."""
    ids = tokenizer.encode(english()[: LONGEST * 12], add_special_tokens=False)[:LONGEST]
    trained.generate([ids[:-1]], 1)
    return ids


def logits_after(llm, prompts, options=None):
    """Return the logits ``[n, vocabulary]`` with which a model predicts each of n given tokens.

    Args:
        prompts: by name, the tokens of a prompt, and the tokens that follow it.
    """
    with forced_outputs(llm, {name: text for name, (_, text) in prompts.items()}) as logits:
        for name, (prompt, text) in prompts.items():
            llm.submit(name, prompt, len(text), extra_args=options)
        llm.drain()
    return {name: torch.stack(logits[name]) for name in prompts}


def divergence(exact, packed):
    """Return the Kullback-Leibler divergence in nats of predictions ``[n, vocabulary]``."""
    exact, packed = exact.log_softmax(-1), packed.log_softmax(-1)
    return (exact.exp() * (exact - packed)).sum(-1)


def test_the_loss_does_not_depend_on_the_length_of_the_prompt(trained, text):
    """vllm#50749. One text is cut to 64 consecutive lengths; the last 16 fill one more page.

    The loss of a length is the mean divergence from `auto` over 8 tokens. Its logarithm is about
    normal. A residue class of k lengths then has a mean within ``z * s / sqrt(k)`` of the mean of
    all 64, where s is their standard deviation. Of all classes, one exceeds that in 1 % of texts.
    That spread includes the page's own cost: the exact tokens behind it bound that.
    """
    starts = range(START, START + LENGTHS)
    whole = {"auto": (text[:START], text[START : START + LENGTHS + SCORED])}
    auto = logits_after(trained, whole, OFF)["auto"]
    cuts = {str(at): (text[:at], text[at : at + SCORED + 1]) for at in starts}
    packed = logits_after(trained, cuts)
    losses = []
    for offset, at in enumerate(starts):
        # The full cache computes the first token.
        after = slice(offset + 1, offset + 1 + SCORED)
        losses.append(divergence(auto[after], packed[str(at)][1:]).mean().item())
    logs = [math.log(loss) for loss in losses]
    assert mean(losses) < 0.03
    edge = next(at for at in starts if packed_end(at) > packed_end(START)) - START
    page_cost = mean(logs[edge : edge + 8]) - mean(logs[edge - 8 : edge])
    assert page_cost < math.log(8), math.exp(page_cost)
    moduli = (16, BLOCK, k4v3.GROUP)
    quantile = NormalDist().inv_cdf(1 - 0.01 / 2 / sum(moduli))
    for modulus in moduli:
        for residue in range(modulus):
            members = [log for at, log in zip(starts, logs, strict=True) if at % modulus == residue]
            bound = quantile * stdev(logs) / math.sqrt(len(members))
            assert abs(mean(members) - mean(logs)) <= bound, (modulus, residue)


TOPICS = {
    "music": "guitar piano violin trumpet flute choir opera drums cello concert melody orchestra"
    " song harp",
    "food": "soup bread cheese cake rice salad pasta honey sandwich dinner recipe pie butter pizza",
    "sport": "football tennis goalkeeper marathon hockey basketball cycling swimming boxing"
    " referee olympics coach volleyball team",
    "weather": "rain storm snow thunder fog wind hail sunshine clouds hurricane forecast"
    " temperature rainbow lightning",
}
SENTENCES = (
    "I have a question about the {}.",
    "Who can tell me more about the {}?",
    "Please say something about the {}.",
    "We talked about the {} all day.",
    "She wrote a long letter about the {}.",
)


def routing_prompts(shots, seed):
    """Yield ten prompts per topic that ask for the desk of a message, each with the right topic.

    Args:
        shots: words of each topic with which every prompt gives two solved examples.
    """
    rng = random.Random(seed)
    words = {topic: rng.sample(text.split(), 14) for topic, text in TOPICS.items()}

    def message(word):
        return f"Message: {rng.choice(SENTENCES).format(word)}\nDesk:"

    solved = [(word, topic) for topic in TOPICS for word in words[topic][:shots] * 2]
    rng.shuffle(solved)
    examples = [f"{message(word)} the {topic} desk\n\n" for word, topic in solved]
    head = "Each message goes to one desk.\n\n" + "".join(examples)
    for topic, own in words.items():
        for word in own[shots:]:
            yield head + message(word), topic


UNDECIDED, LOST = 0.5, 2


def test_routing_prompts_get_the_same_labels(trained, tokenizer):
    """transformers#35185. 40 messages with one right desk each, after 32 solved examples.

    Packing may change a label only where `auto` prefers its own by less than half a nat, and may
    lose at most 2 of the hits of `auto`.
    """
    prompts = [*routing_prompts(4, seed=4)]
    first = {topic: tokenizer.encode(f" {topic}", add_special_tokens=False)[0] for topic in TOPICS}
    assert (len(prompts), len({*first.values()})) == (40, len(TOPICS))
    (article,) = tokenizer.encode(" the", add_special_tokens=False)
    requests = {
        str(index): (tokenizer.encode(prompt), [article, first[topic]])
        for index, (prompt, topic) in enumerate(prompts)
    }
    trained.generate([requests["0"][0]], 1)  # the examples go to the prefix cache
    packed, auto = (logits_after(trained, requests, options) for options in (None, OFF))
    hits, lost = 0, []
    for name, (_, (_, right)) in requests.items():
        # The full cache computes the article.
        exact, read = (rows[name][1].log_softmax(-1) for rows in (auto, packed))
        best, second = exact.topk(2).values
        label = exact.argmax()
        assert label == read.argmax() or best - second < UNDECIDED, prompts[int(name)]
        hits += int(label == right)
        lost += [name] * int(label == right != read.argmax())
    assert hits >= 30
    assert len(lost) <= LOST


def test_no_output_is_one_repeated_token_that_auto_does_not_give(trained, text):
    """omlx#3777. Prompts up to the model's maximum length, and around the ends of packed pages."""
    count, rng = 12, random.Random(7)
    edges = [SHORTEST_PACKED + PAGE * pages + more for pages in (1, 2, 4) for more in (-1, 0, 1)]
    lengths = [
        LONGEST - count,
        *edges,
        *(rng.randint(SHORTEST_PACKED, LONGEST - count) for _ in range(6)),
    ]
    prompts, before = [text[:length] for length in lengths], trained.compressor.compressed
    packed, auto = (trained.generate(prompts, count, extra_args=options) for options in (None, OFF))
    assert trained.compressor.compressed - before == len(prompts)
    looped = [[len({*output[1:]}) == 1 for output in outputs] for outputs in (packed, auto)]
    assert not any(one and not other for one, other in zip(*looped, strict=True))
