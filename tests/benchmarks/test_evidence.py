"""The evidence benchmark must agree with transformers, `vllm_kvcompress.offline` and the engine."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.evidence import outputs
from benchmarks.evidence.cache_formats import CACHE_FORMATS
from benchmarks.evidence.cells import differences, pooled
from benchmarks.evidence.compressed_cache import CompressedCache, PromptCompressor, settings_at
from benchmarks.evidence.outputs import compare_outputs, divergence, full_cache_output
from benchmarks.evidence.reference_model import ReferenceModel, encode
from benchmarks.evidence.report import rules_table
from checkpoints import NumberTokenizer, make, tokens
from engines import BLOCK, engine
from kvcompress_kernels import k4v3
from kvcompress_kernels.column_sums import column_sums
from processor import rounds_with_avx512
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.offline import compress

IDS = tokens(333, seed=8)
NEW = 8
PLAIN_TEXT = Item(name="x", task="x", messages=(), answers=(), max_tokens=NEW)


@pytest.fixture(scope="module", params=["llama-gqa", "qwen2"])
def folder(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(folder):
    model = ReferenceModel(folder)
    model.stop_tokens = set()
    model.tokenizer = NumberTokenizer()
    return model


@pytest.fixture(scope="module")
def prompt(model):
    return model.prefill(IDS, with_column_sums=True)


def test_the_full_cache_and_output_match_transformers(model, folder, prompt):
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        out = reference(torch.tensor([IDS]), use_cache=True)
        generated = reference.generate(
            torch.tensor([IDS]), max_new_tokens=NEW, do_sample=False, eos_token_id=-1
        )
    for layer, (keys, values) in enumerate(zip(prompt.keys, prompt.values, strict=True)):
        theirs = out.past_key_values.layers[layer]
        torch.testing.assert_close(keys, theirs.keys[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, theirs.values[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prompt.logits, out.logits[0, -1], rtol=1e-4, atol=1e-4)
    assert full_cache_output(model, PLAIN_TEXT, prompt).tokens == generated[0, len(IDS) :].tolist()


def test_drafted_tokens_do_not_change_the_full_caches_output(model, prompt, monkeypatch):
    """The model chooses the first three tokens of each draft, and not the others."""
    monkeypatch.setattr(outputs, "_repeated", lambda ids: [])
    expected = full_cache_output(model, LONG_OUTPUT, prompt)

    def draft(ids):
        index = len(ids) - len(IDS)
        return [*expected.tokens[index : index + 3], *range(3, 7)]

    monkeypatch.setattr(outputs, "_repeated", draft)
    output = full_cache_output(model, LONG_OUTPUT, prompt)
    assert output.tokens == expected.tokens
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-3, atol=2e-3)
    for part in ("keys", "values", "queries"):
        for actual, wanted in zip(
            getattr(output.cache, part), getattr(expected.cache, part), strict=True
        ):
            torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("start", [1, 60, 300, 332])
def test_a_prefill_after_a_shared_prefix_gives_the_same_cache(model, prompt, start):
    prefix = model.prefill(IDS[:start], with_column_sums=True)
    again = model.prefill(IDS, with_column_sums=True, prefix=prefix)
    torch.testing.assert_close(again.logits, prompt.logits, rtol=1e-4, atol=1e-4)
    for part in ("keys", "values", "queries", "column_sums"):
        for actual, expected in zip(getattr(again, part), getattr(prompt, part), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def all_queries(model, prompt, monkeypatch):
    """Return the queries of all tokens ``[L, Hq, S, D]``; `prompt` records only the last ones."""
    monkeypatch.setattr("benchmarks.evidence.reference_model.LONGEST_WINDOW", len(IDS))
    return torch.stack(
        [q.transpose(0, 1) for q in model.prefill(IDS, with_column_sums=False).queries]
    )


def test_every_preset_keeps_the_same_cache_as_offline(model, prompt, monkeypatch):
    queries = all_queries(model, prompt, monkeypatch)
    keys, values = torch.stack(prompt.keys), torch.stack(prompt.values)
    sums = column_sums(
        queries[1].transpose(0, 1), keys[1].mT[None], torch.zeros(1).long(), len(IDS),
        keys.shape[-1] ** -0.5,
    )  # fmt: skip
    torch.testing.assert_close(prompt.column_sums[1], sums, rtol=1e-4, atol=1e-4)
    compressor = PromptCompressor(prompt, 16)
    for preset in PRESETS:
        cache = compressor.compress(settings_at(without_lookahead(preset), 0.3))
        expected_cache = compress(queries, keys, values, policy=preset, budget=0.3, page_size=16)
        assert cache.tokens == sum(expected_cache.budgets)
        both = ((*each.keys, *each.values) for each in (cache, expected_cache))
        for actual, expected in zip(*both, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def without_lookahead(preset):
    """Return a preset's settings without a look-ahead, as JSON."""
    return json.dumps({"compress": preset, "lookahead": 0})


def test_a_budget_that_keeps_all_tokens_gives_no_compressed_cache(prompt):
    assert PromptCompressor(prompt).compress(settings_at("cake", 1.0)) is None


@pytest.mark.engine
def test_a_batch_of_caches_gives_the_engines_outputs(model, folder, prompt):
    """Compare all presets and budgets in one batch with requests that the engine compresses."""
    pairs = [(preset, budget) for preset in PRESETS for budget in (0.6, 0.3, 0.15)]
    config = {"kvcompress": {"compress": "off", "allow_override": "all", "min_prompt": 128}}
    config["kvcompress"]["lookahead"] = 0
    requests = [{"kv_compress": preset, "kv_budget": budget} for preset, budget in pairs]
    with engine(folder, additional_config=config, enable_prefix_caching=False) as llm:
        expected = [llm.generate([IDS], NEW, extra_args=request)[0] for request in requests]
        assert llm.compressor.compressed == len(requests)
    full = full_cache_output(model, PLAIN_TEXT, prompt)
    compressor = PromptCompressor(prompt, BLOCK)
    caches = [
        compressor.compress(settings_at(without_lookahead(preset), budget))
        for preset, budget in pairs
    ]
    outputs = compare_outputs(model, PLAIN_TEXT, prompt, caches, full)
    assert [output.tokens for output in outputs] == expected
    # Equal outputs everywhere would make this comparison meaningless.
    assert len({tuple(output.tokens) for output in outputs}) > 5
    assert [output.same for output in outputs] == [tokens == full.tokens for tokens in expected]


def test_the_full_cache_has_no_divergence_from_itself(model, prompt):
    full = full_cache_output(model, PLAIN_TEXT, prompt)
    full_cache = CompressedCache(keys=prompt.keys, values=prompt.values, tokens=0)
    random_cache = PromptCompressor(prompt).compress(settings_at("random", 0.2))
    caches = [full_cache, random_cache]
    uncompressed, compressed = compare_outputs(model, PLAIN_TEXT, prompt, caches, full)
    assert uncompressed.same
    assert uncompressed.top1 == 1.0
    assert uncompressed.mean_kl == pytest.approx(0.0, abs=1e-5)
    assert compressed.mean_kl > 0.01


def test_an_output_of_one_token_has_no_divergence(model, prompt):
    item = replace(PLAIN_TEXT, max_tokens=1)
    random_cache = PromptCompressor(prompt).compress(settings_at("random", 0.2))
    full = full_cache_output(model, item, prompt)
    (output,) = compare_outputs(model, item, prompt, [random_cache], full)
    assert (output.same, output.mean_kl, output.top1) == (True, None, None)


def with_lookahead(preset, tokens):
    """Return a preset's settings at budget 0.3 with a look-ahead of `tokens` tokens."""
    return settings_at(json.dumps({"compress": preset, "lookahead": tokens}), 0.3)


LONG_OUTPUT = replace(PLAIN_TEXT, max_tokens=24)


def test_a_look_ahead_compresses_the_prompt_with_its_first_output_tokens(model, prompt):
    """The cache after the first output tokens equals a prefill of prompt and output together."""
    full = full_cache_output(model, LONG_OUTPUT, prompt)
    extended = full.prompt_with_output(10)
    again = model.prefill(IDS + full.tokens[:10], with_column_sums=False)
    assert extended.ids == again.ids
    torch.testing.assert_close(extended.logits, again.logits, rtol=1e-4, atol=1e-4)
    for part in ("keys", "values"):
        for actual, expected in zip(getattr(extended, part), getattr(again, part), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
    for actual, expected in zip(extended.queries, again.queries, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
    settings = with_lookahead("cake", 10)
    compressor = PromptCompressor(extended, 16, output_tokens=10)
    plan = compressor.plan(settings)
    assert (plan.window, plan.tokens) == (10, len(IDS) + 10)
    plain = settings_at("cake", 0.3)
    assert plan.budget == plain.budget_spec(model.num_layers, len(IDS)).budget + 10
    cache, without = compressor.compress(settings), PromptCompressor(prompt, 16).compress(plain)
    assert abs(cache.tokens - without.tokens - 10 * model.num_layers) < 16 * model.num_layers
    with pytest.raises(AssertionError):
        compressor.compress(with_lookahead("cake", 11))


def test_outputs_match_the_full_cache_until_the_look_ahead_ends(model, prompt):
    """Forced output tokens match, too: no cache chooses them."""
    full = full_cache_output(model, LONG_OUTPUT, prompt)
    forced = [token + 1 for token in full.tokens[:14]]
    late = full_cache_output(model, LONG_OUTPUT, prompt, forced)
    assert late.tokens[:14] == forced
    assert late.tokens != full.tokens
    extended = late.prompt_with_output(10)
    late_cache = PromptCompressor(extended, output_tokens=10).compress(with_lookahead("cake", 10))
    (output,) = compare_outputs(model, LONG_OUTPUT, extended, [late_cache], late)
    assert output.tokens[:14] == forced
    assert output.agreed[:13] == [True] * 13
    assert max(output.kl[10:13]) > 1e-4
    extended = full.prompt_with_output(10)
    chunks = with_lookahead("cake-chunk", 10)
    cache = PromptCompressor(extended, output_tokens=10).compress(chunks)
    (output,) = compare_outputs(model, LONG_OUTPUT, extended, [cache], full)
    assert output.tokens[:11] == full.tokens[:11]
    assert output.kl[:10] == [0.0] * 10
    assert output.agreed[:10] == [True] * 10
    assert len(output.kl) == len(output.agreed) == len(full.tokens) - 1
    assert max(output.kl[10:]) > 1e-3
    assert full.prompt_with_output(22) is not None
    assert full.prompt_with_output(23) is None  # no token follows the last one


def test_an_output_that_is_not_decoded_fully_ends_at_its_first_difference(model, prompt):
    full = full_cache_output(model, LONG_OUTPUT, prompt)
    random_cache = PromptCompressor(prompt).compress(settings_at("random", 0.1))
    arguments = model, LONG_OUTPUT, prompt, [random_cache], full
    (complete,) = compare_outputs(*arguments)
    (partial,) = compare_outputs(*arguments, decode_fully=False)
    assert (partial.kl, partial.agreed, partial.same) == (complete.kl, complete.agreed, False)
    assert len(partial.tokens) < len(complete.tokens) == 24
    assert complete.tokens[: len(partial.tokens)] == partial.tokens


@pytest.mark.engine
@pytest.mark.parametrize("preset", ["cake", "cake-chunk", "snapkv"])
def test_caches_with_a_look_ahead_give_the_engines_outputs(model, folder, prompt, preset):
    config = {"compress": preset, "budget": 0.2, "lookahead": 10, "min_prompt": 128}
    options = {"additional_config": {"kvcompress": config}, "enable_prefix_caching": False}
    with engine(folder, **options) as llm:
        (expected,) = llm.generate([IDS], LONG_OUTPUT.max_tokens)
        assert llm.compressor.compressed == 1
    full = full_cache_output(model, LONG_OUTPUT, prompt)
    extended = full.prompt_with_output(10)
    evicting = settings_at(json.dumps({"compress": preset, "lookahead": 10}), 0.2)
    cache = PromptCompressor(extended, BLOCK, output_tokens=10).compress(evicting)
    (output,) = compare_outputs(model, LONG_OUTPUT, extended, [cache], full)
    assert output.tokens == expected
    assert output.tokens != full.tokens  # otherwise the comparison shows nothing


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """Return a model of 3 layers with the smallest head dimension that k4v3 packs."""
    model = ReferenceModel(make("qwen3", tmp_path_factory.mktemp("wide")))
    assert (model.num_layers, model.dim) == (3, 64)
    model.stop_tokens, model.tokenizer = set(), NumberTokenizer()
    return model


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_a_packed_cache_has_the_numbers_and_bytes_of_packed_pages(wide_model, budget):
    """Of 333 tokens, the first 16 and the last 45, at least 32, stay at 16 bits."""
    prompt = wide_model.prefill(IDS, with_column_sums=False)
    compressor = PromptCompressor(prompt)
    raw = '{"compress": "snapkv", "packed_dtype": "k4v3"}'
    cache = compressor.compress(settings_at(raw, budget))
    plan = compressor.plan(settings_at(raw, budget))
    pages = plan.pages // 3
    assert (plan.page_tokens, pages) == (64, {1.0: 5, 0.5: 2}[budget])
    in_pages = {1.0: 333 - 16 - 45, 0.5: 2 * 64}[budget]
    assert cache.tokens == 3 * (16 + in_pages + 45)
    assert cache.share_of_bytes == pytest.approx((16 + 16 * pages + 45) / 333)
    method = settings_at(raw, budget).method.method_for(scored_by_output=False)
    observations = compressor.observations(method, plan)
    positions = method.select(observations, plan, method.layer_pages(plan, observations)).long()
    for layer in range(3):
        index = positions[layer, ..., None].expand(-1, -1, 64)
        exact_keys = prompt.keys[layer].gather(1, index)
        exact_values = prompt.values[layer].gather(1, index)
        for start in range(16, 16 + in_pages // 64 * 64, 64):
            group = slice(start, start + 64)
            packed = k4v3.quantise(exact_keys[:, group], exact_values[:, group], 64)
            keys, values = k4v3.dequantise(k4v3.from_bytes(k4v3.to_bytes(packed)))
            assert torch.equal(cache.keys[layer][:, group], keys)
            assert torch.equal(cache.values[layer][:, group], values)
        assert torch.equal(cache.keys[layer][:, :16], prompt.keys[layer][:, :16])
        assert torch.equal(cache.keys[layer][:, -45:], prompt.keys[layer][:, -45:])
        assert torch.equal(cache.values[layer][:, -45:], prompt.values[layer][:, -45:])


def test_the_last_group_of_a_packed_cache_may_be_partly_filled(wide_model):
    prompt = wide_model.prefill(IDS[:300], with_column_sums=False)
    raw = '{"compress": "snapkv", "packed_dtype": "k4v3"}'
    cache = PromptCompressor(prompt).compress(settings_at(raw, 1.0))
    assert cache.share_of_bytes == pytest.approx((16 + 4 * 16 + 44) / 300)
    last = k4v3.quantise(
        *(torch.nn.functional.pad(part[1][:, 208:256], (0, 0, 0, 16))
          for part in (prompt.keys, prompt.values)),
        48,
    )  # fmt: skip
    keys, values = k4v3.dequantise(last)
    assert torch.equal(cache.keys[1][:, 208:256], keys[:, :48])
    assert torch.equal(cache.values[1][:, 208:256], values[:, :48])


def test_a_model_that_k4v3_cannot_pack_is_an_error(prompt):
    settings = settings_at('{"compress": "cake", "packed_dtype": "k4v3"}', 0.5)
    with pytest.raises(AssertionError, match="at least 64"):
        PromptCompressor(prompt).compress(settings)


OFF = '{"compress": "off"}'


@pytest.mark.parametrize(
    "name", ["fp8", pytest.param("int4_per_token_head", marks=rounds_with_avx512)]
)
def test_a_low_bit_cache_decodes_as_a_prefill_in_its_format(model, prompt, name):
    low_bit = CACHE_FORMATS[name]
    full = full_cache_output(model, LONG_OUTPUT, prompt)
    stored = model.stored_as(prompt, low_bit)
    cache = PromptCompressor(stored).compress(settings_at(OFF, 1.0))
    assert cache.share_of_bytes == low_bit.token_bytes(32) / 128
    (output,) = compare_outputs(model, LONG_OUTPUT, stored, [cache], full)
    for count in (1, 11, 23):
        again = model.prefill(
            IDS + full.tokens[:count], with_column_sums=False, cache_format=low_bit
        )
        expected = divergence(full.logits[count - 1].log_softmax(-1), again.logits)
        assert output.kl[count - 1] == pytest.approx(float(expected), rel=1e-2, abs=1e-5)
    assert max(output.kl) > 1e-4
    extended = full.prompt_with_output(10)
    continued = model.stored_as(extended, low_bit, prefix=stored)
    at_once = model.stored_as(extended, low_bit)
    for actual, expected in zip(continued.keys, at_once.keys, strict=True):
        # Rounding may turn a difference in the last bit into one step of the format.
        assert ((actual - expected).abs() > 1e-3).float().mean() < 0.01


def test_turboquant_rounds_after_an_exact_prefill(wide_model):
    prompt = wide_model.prefill(IDS, with_column_sums=False)
    low_bit = CACHE_FORMATS["turboquant_4bit_nc"]
    stored = wide_model.stored_as(prompt, low_bit)
    assert torch.equal(stored.logits, prompt.logits)
    keys, values = low_bit.stored(1, 3, prompt.keys[1], prompt.values[1])
    assert torch.equal(stored.keys[1], keys)
    assert torch.equal(stored.values[1], values)
    assert not torch.equal(keys, prompt.keys[1])
    for layer in (0, 2):
        assert torch.equal(stored.keys[layer], prompt.keys[layer])
    cache = PromptCompressor(stored).compress(settings_at(OFF, 1.0))
    assert cache.share_of_bytes == pytest.approx((2 + 70 / 256) / 3)


def test_eviction_from_an_fp8_cache_keeps_fp8_numbers(model, prompt):
    stored = model.stored_as(prompt, CACHE_FORMATS["fp8"])
    cache = PromptCompressor(stored).compress(settings_at('{"compress": "snapkv"}', 0.3))
    for kept in (*cache.keys, *cache.values):
        assert torch.equal(kept.to(torch.float8_e4m3fn).float(), kept)
    assert cache.share_of_bytes == pytest.approx(cache.tokens / len(prompt.keys) / len(IDS) / 2)


def test_a_hybrid_model_matches_transformers_and_keeps_its_sliding_windows(tmp_path):
    folder = make("gemma3", tmp_path)
    model = ReferenceModel(folder)
    model.stop_tokens, model.tokenizer = set(), NumberTokenizer()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        generated = reference.generate(
            torch.tensor([IDS]), max_new_tokens=24, do_sample=False, eos_token_id=-1
        )
        logits = reference(generated).logits[0, len(IDS) - 1 : -1]
    prompt = model.prefill(
        IDS, with_column_sums=False, prefix=model.prefill(IDS[:200], with_column_sums=False)
    )
    torch.testing.assert_close(prompt.logits, logits[0], rtol=1e-4, atol=1e-4)
    full = full_cache_output(model, LONG_OUTPUT, prompt)
    torch.testing.assert_close(full.logits, logits[1:], rtol=1e-4, atol=1e-4)
    window_layers = [n for n, window in enumerate(model.sliding_windows) if window is not None]
    assert 0 < len(window_layers) < model.num_layers
    extended = full.prompt_with_output(10)
    cache = PromptCompressor(extended, output_tokens=10).compress(with_lookahead("cake", 10))
    assert cache.tokens < 0.5 * len(IDS) * len(prompt.full_layers)
    for layer in window_layers:
        window = model.sliding_windows[layer]
        torch.testing.assert_close(cache.keys[layer], extended.keys[layer][:, -window:])
    # With full caches in the other layers, the sliding windows alone must lose nothing.
    for layer in prompt.full_layers:
        cache.keys[layer], cache.values[layer] = extended.keys[layer], extended.values[layer]
    (output,) = compare_outputs(model, LONG_OUTPUT, extended, [cache], full)
    assert output.same
    assert output.mean_kl == pytest.approx(0.0, abs=1e-5)


def test_a_chat_without_a_chat_template_is_an_error():
    class BaseModelTokenizer(NumberTokenizer):
        chat_template = None

        def encode(self, text):
            return [len(text)]

    assert encode(BaseModelTokenizer(), [{"role": "assistant", "content": "continue this"}]) == [13]
    with pytest.raises(SystemExit, match="needs a model with a chat template"):
        encode(BaseModelTokenizer(), [{"role": "user", "content": "a question"}])


def test_the_rules_table_counts_only_rules_that_the_full_cache_obeys():
    def line(item, method, **rules):
        return {
            "task": "t", "item": item, "group": None, "seed": 0, "method": method, "budget": 0.2,
            "rules": rules,
        }  # fmt: skip

    table = rules_table(
        [
            line("1", "a", x=[True, True], y=[False, True]),
            line("2", "a", x=[False, True], y=[True, False]),
            line("3", "a", x=[True, False], y=[True, False]),
            line("1", "b", x=[True, True], y=[True, True]),
            {"task": "other", "item": "1", "method": "a", "budget": 0.2},
        ]
    )
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert rows[0] == ["rule", "prompts", "`a` 0.2", "`b` 0.2"]
    assert [row[:2] for row in rows[2:]] == [["t", "2, 1"], ["t: x", "2, 1"], ["t: y", "1"]]
    shares = [[cell.split(" ")[0] for cell in row[2:]] for row in rows[2:]]
    assert shares == [["33%", "100%"], ["50%", "100%"], ["0%", "100%"]]
    assert rules_table([]) == ""


def test_differences_compare_the_same_tokens_of_both_systems():
    def line(method, question, item, agreed, kl, task="summary"):
        # 32 tokens follow the first; only the later ones count
        agreed_at, kl_at = "1" * 31 + agreed, [9.0] * 31 + kl
        text = {"task": task, "item": item, "group": item, "question": question, "seed": 2}
        return text | {"method": method, "budget": 1.0, "agreed_at": agreed_at, "kl_at": kl_at}

    results = [
        line("a", "first", "summary/0", "1111", [0.0] * 4),
        line("b", "first", "summary/0", "1100", [1.0] * 4),
        line("a", "last", "summary/0", "11", [0.5] * 2),
        line("b", "last", "summary/0", "11", [0.5] * 2),
        line("a", "last", "points/0", "", []),  # ends before the tokens that count
        line("b", "last", "points/0", "", []),
        line("a", "last", "points/1", "0000", [9.0] * 4),  # the other system lacks it
        line("a", "last", "niah/0", "0000", [9.0] * 4, task="niah-single"),
        line("b", "last", "niah/0", "1111", [0.0] * 4, task="niah-single"),
    ]
    (pair, (top1, kl, tokens)) = next(iter(differences(pooled(results)).items()))
    assert pair == (("a", 1.0), ("b", 1.0))
    assert (top1.prompts, top1.independent, tokens) == (2, 1, 6)
    assert top1.mean == pytest.approx(2 / 6)
    assert kl.mean == pytest.approx(-4 / 6)
