"""Simulated long outputs must hold what the engine holds, and draw random tokens reproducibly."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import json

import pytest
import torch

from benchmarks.evidence import compressed_cache, simulated_request
from benchmarks.evidence.long_outputs import System, compared, part_means, sampled
from benchmarks.evidence.long_outputs_table import report
from benchmarks.evidence.random_outputs import REDRAW, UNIFORM, output_scores, random_numbers
from benchmarks.evidence.reference_model import ReferenceModel
from benchmarks.evidence.simulated_request import SCORED, SimulatedRequest
from checkpoints import make, tokens
from engines import BLOCK, engine
from processor import rounds_with_avx512
from vllm_kvcompress.settings.config import CompressionConfig

PROMPTS = {"whole": tokens(45, seed=5), "packed": tokens(333, seed=8)}
NUM_OUTPUT = 200
LOOKAHEAD = {"cake-chunk": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("llama-gqa", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(folder):
    return ReferenceModel(folder)


def parsed(method, **settings):
    """Return the settings of an engine with a decode budget and the same settings as a dict."""
    raw = {"compress": method, "budget": 0.3, "min_prompt": 128, **settings}
    raw["lookahead"] = LOOKAHEAD.get(method, 0)
    return raw, CompressionConfig.parse(raw)


def begin(model, settings, prompt, output, **options):
    """Return a simulated request after its prompt, and the output that is left to feed to it."""
    exact = model.prefill(prompt, with_column_sums=False)
    ahead = settings.resolved_lookahead if len(prompt) >= settings.min_prompt else 0
    if ahead:
        exact = model.prefill(prompt + output[:ahead], with_column_sums=False, prefix=exact)
    if len(prompt) < settings.min_prompt:
        settings = settings.variant(budget=1.0)
    request = SimulatedRequest.begin(
        model,
        settings,
        exact,
        prompt_tokens=len(prompt),
        max_tokens=len(prompt) + len(output),
        block_size=BLOCK,
        **options,
    )
    return request, output[ahead:-1]


def bounded(budget):
    return {"decode_budget": budget, "decode_interval": BLOCK}


@pytest.mark.engine
@pytest.mark.parametrize("method", ["cake-chunk", "snapkv", "tova", "streamingllm", "cake"])
def test_a_simulated_request_holds_the_slots_that_the_engine_keeps(
    method, model, folder, monkeypatch
):
    raw, settings = parsed(method, **bounded(128))
    with engine(folder, additional_config={"kvcompress": raw}, enable_prefix_caching=False) as llm:
        expected: dict[str, list] = {}
        outputs = {}

        def packed(pack_request, kept, counts):
            if not pack_request.prefill:
                held = zip(kept, (counts * BLOCK).tolist(), strict=True)
                expected[name].append([slots[:, :count].tolist() for slots, count in held])

        llm.compressor.packer.observers.append(packed)
        for name, prompt in PROMPTS.items():
            expected[name] = []
            (outputs[name],) = llm.generate([prompt], NUM_OUTPUT)

    kept_slots = SimulatedRequest._kept_slots
    seen: list = []

    def recording(self, plan, method):
        kept, counts = kept_slots(self, plan, method)
        held = zip(kept, (counts * BLOCK).tolist(), strict=True)
        seen.append([slots[:, :count].tolist() for slots, count in held])
        return kept, counts

    monkeypatch.setattr(SimulatedRequest, "_kept_slots", recording)
    for name, prompt in PROMPTS.items():
        seen.clear()
        request, rest = begin(model, settings, prompt, outputs[name])
        chosen = model.logits(request.feed(rest)).argmax(-1).tolist()
        assert len(expected[name]) >= 3
        assert seen == expected[name]
        assert chosen == outputs[name][-len(rest) :]


@pytest.mark.engine
@rounds_with_avx512
def test_simulated_groups_give_the_engines_output(tmp_path, monkeypatch):
    """In float32, as the test engine's cache is, packed pages hold twice as many tokens."""
    for module in (compressed_cache, simulated_request):
        monkeypatch.setattr(module, "ITEMSIZE", 4)
    folder = make("qwen3", tmp_path)
    raw = {"compress": "cake", "budget": 1.0, "min_prompt": 128, "packed_dtype": "k4v3"}
    raw |= {"lookahead": 0, "decode_interval": 256}
    prompt = tokens(333, seed=8)
    with engine(folder, additional_config={"kvcompress": raw}, enable_prefix_caching=False) as llm:
        (output,) = llm.generate([prompt], 600)
    model = ReferenceModel(folder)
    request, rest = begin(model, CompressionConfig.parse(raw), prompt, output)
    chosen = model.logits(request.feed(rest)).argmax(-1).tolist()
    assert chosen == output[1:]
    assert request.footprint.first_block * BLOCK > len(prompt) + 256
    # The prompt's 10 full blocks and two intervals of 256 tokens, in pages of 256 tokens.
    assert request.footprint.pages == model.num_layers * 4
    unpacked = request.computed - request.footprint.first_block * BLOCK
    assert request.held[-1] == model.num_layers * (4 * BLOCK + unpacked)


def test_requests_hold_the_memory_of_their_pages(model):
    """The packed prompt and output tokens, then the budget and the tokens since the last packing"""
    _, settings = parsed("snapkv", **bounded(128))
    request, rest = begin(model, settings, PROMPTS["whole"], tokens(NUM_OUTPUT, seed=1))
    request.feed(rest)
    packings = [
        after for before, after in zip(request.held, request.held[1:], strict=False)
        if after < before
    ]  # fmt: skip
    assert packings == [model.num_layers * 129] * len(packings)
    assert len(packings) >= 2
    assert max(request.held) == model.num_layers * (128 + BLOCK)
    assert [keys.shape[1] for keys in request.keys] == [request.held[-1] // model.num_layers] * (
        model.num_layers
    )


def compare(model, systems, output, facts=()):
    return [
        result for _, result in compared(model, PROMPTS["packed"], output, facts, systems, seed=0)
    ]


def test_the_full_cache_differs_from_no_system_that_keeps_everything(model, monkeypatch):
    """A low-bit cache differs and holds half the bytes; a decode budget above the length does not.

    The facts use token ids as text.
    """
    monkeypatch.setattr(ReferenceModel, "tokenizer", NumberTokenizer())
    _, everything = parsed("cake", budget=1.0, **bounded(1024))
    _, small = parsed("snapkv", **bounded(128))
    off = CompressionConfig.parse({"compress": "off"})
    systems = [
        System(name="everything", settings=everything),
        System(name="small", settings=small),
        System(name="fp8", settings=off, cache="fp8"),
    ]
    output = tokens(100, seed=2)
    full = compared_facts(model, output)
    whole, bounded_result, fp8 = compare(model, systems, output, facts=full)
    assert max(whole["kl"]) < 1e-5
    assert whole["equal"] == [1.0] * 4
    assert whole["bytes"] == [1.0] * 4
    assert (whole["facts"], whole["known"], whole["found"]) == (2, 1, 1)
    assert min(bounded_result["kl"]) > 1e-4
    assert bounded_result["bytes"][0] < 0.5
    assert fp8["bytes"] == [0.5] * 4
    assert max(fp8["kl"]) > 1e-6


class NumberTokenizer:
    """A tokenizer for test models, which have none: text is token ids in decimal."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]


def compared_facts(model, output):
    """Return a fact that the full cache writes and one that it does not."""
    ids = [*PROMPTS["packed"], *output[:-1], 5, 6]
    (right,) = [int(model.prefill(ids, with_column_sums=False).logits.argmax())]
    return [("5 6", str(right)), ("5 6", str(right + 1))]


def test_outputs_are_sampled_with_the_prompts_own_seed(model):
    """Prompts of different lengths share a batch; each output is the one that it gets alone."""
    prompts = [model.prefill(ids, with_column_sums=False) for ids in PROMPTS.values()]
    first, second = sampled(model, prompts, 12, 0.8, [3, 4])
    assert sampled(model, prompts[1:], 12, 0.8, [4]) == [second]
    assert sampled(model, prompts[:1], 12, 0.8, [5]) != [first]
    greedy = sampled(model, prompts[:1], 4, 1e-6, [0])[0]
    ids = list(PROMPTS["whole"])
    for token in greedy:
        assert token == int(model.prefill(ids, with_column_sums=False).logits.argmax())
        ids.append(token)


@pytest.mark.parametrize("kind", [REDRAW, UNIFORM, SCORED])
def test_the_prompt_stays_where_only_output_tokens_are_dropped(kind, model):
    """Draws depend on the seed alone, and scores not at all on it."""
    _, settings = parsed("cake-chunk", **bounded(192))
    prompt, output = PROMPTS["packed"], tokens(NUM_OUTPUT, seed=1)

    def held_keys(seed):
        request, rest = begin(model, settings, prompt, output, kept_prompt=kind, seed=seed)
        before = request.keys
        request.feed(rest)
        assert request.counts is not None
        for layer_keys, prompt_keys in zip(request.keys, before, strict=True):
            assert torch.equal(layer_keys[:, : prompt_keys.shape[1]], prompt_keys)
            assert layer_keys.shape[1] > prompt_keys.shape[1]
        return request.keys

    first = held_keys(1)
    assert all(map(torch.equal, first, held_keys(1)))
    assert all(map(torch.equal, first, held_keys(2))) == (kind == SCORED)


def test_uniform_draws_sample_the_whole_output_evenly_and_redraws_thin_out_old_tokens():
    """40 packings of 32 new tokens to 64 kept ones, for 400 KV heads."""
    prompt, keep, interval, heads = 3, 64, 32, 400
    shares = {}
    for kind in (REDRAW, UNIFORM):
        held = torch.arange(keep).expand(heads, -1)
        for packing in range(1, 41):
            computed = keep + packing * interval
            new = torch.arange(computed - interval, computed).expand(heads, -1)
            held = torch.cat([held, new], 1)
            scores = output_scores(
                kind,
                torch.tensor([prompt]),
                random_numbers(0, 1, heads, prompt + held.shape[1], computed),
                sampled_slots=keep,
                sampled_share=keep / (computed - interval),
            )[0]
            assert scores[:, :prompt].isinf().all()
            best = scores[:, prompt:].topk(keep, 1).indices.sort(1).values
            held = held.gather(1, best)
        quarters = torch.bincount((held * 4 // computed).flatten(), minlength=4)
        shares[kind] = (quarters / held.numel()).tolist()
    assert shares[UNIFORM] == pytest.approx([0.25] * 4, abs=0.02)
    assert shares[REDRAW][0] < 0.01
    assert shares[REDRAW][3] > 0.9


def test_random_numbers_are_uniform_and_differ_between_layers_heads_and_packings():
    numbers = random_numbers(7, 4, 3, 500, 640)
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.02)
    assert numbers.var().item() == pytest.approx(1 / 12, abs=0.01)
    rows = [*numbers.flatten(0, 1), *random_numbers(7, 1, 1, 500, 768)[0]]
    correlation = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows))
    assert correlation.abs().max() < 0.2
    assert torch.equal(random_numbers(7, 2, 3, 100, 640), numbers[:2, :, :100])


def test_part_means_cover_all_tokens():
    assert part_means([1.0] * 3 + [2.0] * 3 + [3.0] * 4 + [4.0] * 3) == [1.0, 2.0, 3.0, 4.0]


def test_the_report_pairs_each_system_with_ours(tmp_path):
    """And gives its own table to each model, budget and kind of prompt."""
    common = {"model": "m", "output_tokens": 80, "prompt_budget": 0.4, "decode_interval": 128}
    common |= {"equal": [0.9] * 4, "bytes": [0.5, 0.4, 0.3, 0.2], "decode_budget": 512}
    rows = []
    for item, kl in (("a", 0.1), ("b", 0.3)):
        for system, factor in (("cake-chunk", 1), ("random output, uniform", 3)):
            line = {**common, "item": item, "group": item, "system": system}
            rows.append({**line, "kl": [kl * factor] * 4})
    fp8 = {"system": "fp8", "prompt_budget": 1.0, "decode_budget": None, "kl": [0.0] * 4}
    rows += [{**rows[0], **fp8}, {**rows[0], **fp8, "item": "unmeasured", "kl": [9.0] * 4}]
    rows.append({**rows[0], "item": "c", "facts": 10, "known": 4, "found": 3})
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report([path])
    title = "outputs of 80 tokens, prompt budget 0.4, decode budget 512**"
    assert f"**m, requests, {title}" in text
    assert f"**m, texts with hidden numbers, {title}" in text
    assert "| `random output, uniform` | 2 | 0.6000, 0.6000, 0.6000, 0.6000 |" in text
    assert "+0.4000 (+0.2000 to +0.6000)" in text
    assert "| `fp8` | 1 | 0.0000, 0.0000, 0.0000, 0.0000 |" in text
    assert "| 0.20 | 3 of 4 |" in text
