"""The benchmark that reads a prompt once: it must say what transformers, offline and engine say."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.evidence.answers import compare, full_answer
from benchmarks.evidence.kept import Kept, Scored, settings_of
from benchmarks.evidence.obeyed import obeyed
from benchmarks.evidence.reader import Reader, encode
from checkpoints import make, tokens
from engines import BLOCK, engine
from kvcompress_kernels.column_sums import column_sums
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.methods.presets import PRESETS
from vllm_kvcompress.offline import compress

IDS = tokens(333, seed=8)
NEW = 8
NOTHING_ASKED = Item(name="x", task="x", messages=(), answers=(), max_tokens=NEW)


class Numbers:
    """A tokenizer of a model that has none."""

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


@pytest.fixture(scope="module", params=["llama-gqa", "qwen2"])
def folder(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reader(folder):
    made = Reader(folder)
    made.stops = set()
    made.tokenizer = Numbers()
    return made


@pytest.fixture(scope="module")
def prompt(reader):
    return reader.read(IDS, sums=True)


def test_the_full_cache_is_transformers_own(reader, folder, prompt):
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        out = own(torch.tensor([IDS]), use_cache=True)
        said = own.generate(
            torch.tensor([IDS]), max_new_tokens=NEW, do_sample=False, eos_token_id=-1
        )
    for layer, (keys, values) in enumerate(zip(prompt.keys, prompt.values, strict=True)):
        theirs = out.past_key_values.layers[layer]
        torch.testing.assert_close(keys, theirs.keys[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, theirs.values[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prompt.logits, out.logits[0, -1], rtol=1e-4, atol=1e-4)
    assert full_answer(reader, NOTHING_ASKED, prompt).tokens == said[0, len(IDS) :].tolist()


@pytest.mark.parametrize("start", [1, 60, 300, 332])
def test_a_prompt_that_begins_like_another_is_the_same(reader, prompt, start):
    again = reader.read(IDS, sums=True, earlier=reader.read(IDS[:start], sums=True))
    torch.testing.assert_close(again.logits, prompt.logits, rtol=1e-4, atol=1e-4)
    for part in ("keys", "values", "queries", "sums"):
        for mine, whole in zip(getattr(again, part), getattr(prompt, part), strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-4)


def whole_queries(reader, prompt, monkeypatch):
    """``[L, Hq, S, D]``: the queries of all tokens, where `prompt` keeps the last ones."""
    monkeypatch.setattr("benchmarks.evidence.reader.LONGEST_WINDOW", len(IDS))
    return torch.stack([q.transpose(0, 1) for q in reader.read(IDS, sums=False).queries])


def test_what_is_kept_is_what_offline_keeps(reader, prompt, monkeypatch):
    queries = whole_queries(reader, prompt, monkeypatch)
    keys, values = torch.stack(prompt.keys), torch.stack(prompt.values)
    sums = column_sums(
        queries[1].transpose(0, 1), keys[1].mT[None], torch.zeros(1).long(), len(IDS),
        keys.shape[-1] ** -0.5,
    )  # fmt: skip
    torch.testing.assert_close(prompt.sums[1], sums, rtol=1e-4, atol=1e-4)
    scored = Scored(prompt, 16)
    for preset in PRESETS:
        made = scored.keep(settings_of(at_once(preset), 0.3))
        want = compress(queries, keys, values, policy=preset, budget=0.3, page_size=16)
        assert made.tokens == sum(want.budgets)
        for mine, theirs in zip(
            (*made.keys, *made.values), (*want.keys, *want.values), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def at_once(preset):
    """Its settings without a look-ahead, of its own or another."""
    return json.dumps({"compress": preset, "lookahead": 0})


def test_a_budget_that_keeps_all_keeps_nothing_apart(prompt):
    assert Scored(prompt).keep(settings_of("cake", 1.0)) is None


@pytest.mark.engine
def test_rows_answer_as_the_engine_does(reader, folder, prompt):
    """Every preset and budget in one batch, against requests that the engine compresses alone."""
    asked = [(preset, budget) for preset in PRESETS for budget in (0.6, 0.3, 0.15)]
    allowed = {"kvcompress": {"compress": "off", "allow_override": "all", "min_prompt": 128}}
    allowed["kvcompress"] |= {"lookahead": 0, "protect": "system"}
    guarded = ["cake", "snapkv"]
    asks = [{"kv_compress": preset, "kv_budget": budget} for preset, budget in asked]
    asks += [{"kv_compress": preset, "kv_budget": 0.2, "kv_protect": "5:40"} for preset in guarded]
    with engine(folder, additional_config=allowed, enable_prefix_caching=False) as llm:
        theirs = [llm.generate([IDS], NEW, extra_args=each)[0] for each in asks]
        assert llm.compressor.compressed == len(asks)
    full = full_answer(reader, NOTHING_ASKED, prompt)
    scored = Scored(prompt, BLOCK, parts={"system": ((5, 40),)})
    kept = [scored.keep(settings_of(at_once(preset), budget)) for preset, budget in asked]
    for preset in guarded:
        raw = json.dumps({"compress": preset, "lookahead": 0, "protect": "system"})
        kept.append(scored.keep(settings_of(raw, 0.2)))
    mine = compare(reader, NOTHING_ASKED, prompt, kept, full)
    assert [each.tokens for each in mine] == theirs
    assert len({tuple(each.tokens) for each in mine}) > 5  # or nothing was told apart
    assert [each.same for each in mine] == [answer == full.tokens for answer in theirs]


def test_the_full_cache_beside_itself_differs_in_nothing(reader, prompt):
    full = full_answer(reader, NOTHING_ASKED, prompt)
    whole = Kept(keys=prompt.keys, values=prompt.values, tokens=0)
    half = Scored(prompt).keep(settings_of("random", 0.2))
    one, other = compare(reader, NOTHING_ASKED, prompt, [whole, half], full)
    assert one.same
    assert one.top1 == 1.0
    assert one.mean_kl == pytest.approx(0.0, abs=1e-5)
    assert other.mean_kl > 0.01


def test_an_answer_of_one_token_says_nothing_of_the_cache(reader, prompt):
    item = replace(NOTHING_ASKED, max_tokens=1)
    half = Scored(prompt).keep(settings_of("random", 0.2))
    (made,) = compare(reader, item, prompt, [half], full_answer(reader, item, prompt))
    assert (made.same, made.mean_kl, made.top1) == (True, None, None)


def ahead(preset, tokens):
    return settings_of(json.dumps({"compress": preset, "lookahead": tokens}), 0.3)


LONG = replace(NOTHING_ASKED, max_tokens=24)


def test_a_look_ahead_is_a_longer_prompt_that_the_answer_judges(reader, prompt):
    """The cache behind the answer's tokens, and what is kept of it, are those of one prefill."""
    full = full_answer(reader, LONG, prompt)
    begun = full.after(10)
    again = reader.read(IDS + full.tokens[:10], sums=False)
    assert begun.ids == again.ids
    torch.testing.assert_close(begun.logits, again.logits, rtol=1e-4, atol=1e-4)
    for part in ("keys", "values"):
        for mine, whole in zip(getattr(begun, part), getattr(again, part), strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-3)
    for mine, whole in zip(begun.queries, again.queries, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-3)
    settings = ahead("cake", 10)
    scored = Scored(begun, 16, answered=10)
    plan = scored.plan(settings)
    assert (plan.window, plan.tokens) == (10, len(IDS) + 10)
    assert plan.budget == settings_of("cake", 0.3).prompt(reader.layers, len(IDS)).budget + 10
    mine, other = scored.keep(settings), Scored(prompt, 16).keep(settings_of("cake", 0.3))
    assert abs(mine.tokens - other.tokens - 10 * reader.layers) < 16 * reader.layers
    with pytest.raises(AssertionError):
        scored.keep(ahead("cake", 11))


def test_what_looks_ahead_is_the_full_caches_until_then(reader, prompt):
    """And so are tokens that an answer was begun with, which no cache chooses."""
    full = full_answer(reader, LONG, prompt)
    given = [token + 1 for token in full.tokens[:14]]
    late = full_answer(reader, LONG, prompt, given)
    assert late.tokens[:14] == given
    assert late.tokens != full.tokens
    half = Scored(late.after(10), answered=10).keep(ahead("cake", 10))
    (made,) = compare(reader, LONG, late.after(10), [half], late)
    assert made.tokens[:14] == given
    assert made.agreed[:13] == [True] * 13
    assert max(made.kl[10:13]) > 1e-4
    kept = Scored(full.after(10), answered=10).keep(ahead("cake-chunk", 10))
    (made,) = compare(reader, LONG, full.after(10), [kept], full)
    assert made.tokens[:11] == full.tokens[:11]
    assert made.kl[:10] == [0.0] * 10
    assert made.agreed[:10] == [True] * 10
    assert len(made.kl) == len(made.agreed) == len(full.tokens) - 1
    assert max(made.kl[10:]) > 1e-3
    assert full.after(22) is not None
    assert full.after(23) is None  # its last token is read from no cache


def test_an_answer_that_is_not_decoded_on_ends_where_it_differs(reader, prompt):
    full = full_answer(reader, LONG, prompt)
    half = Scored(prompt).keep(settings_of("random", 0.1))
    (on,) = compare(reader, LONG, prompt, [half], full)
    (cut,) = compare(reader, LONG, prompt, [half], full, own_answers=False)
    assert (cut.kl, cut.agreed, cut.same) == (on.kl, on.agreed, False)
    assert len(cut.tokens) < len(on.tokens) == 24
    assert on.tokens[: len(cut.tokens)] == cut.tokens


@pytest.mark.engine
@pytest.mark.parametrize("preset", ["cake", "cake-chunk", "snapkv"])
def test_look_aheads_answer_as_the_engine_does(reader, folder, prompt, preset):
    asked = {"compress": preset, "budget": 0.2, "lookahead": 10, "min_prompt": 128}
    with engine(
        folder, additional_config={"kvcompress": asked}, enable_prefix_caching=False
    ) as llm:
        (theirs,) = llm.generate([IDS], LONG.max_tokens)
        assert llm.compressor.compressed == 1
    full = full_answer(reader, LONG, prompt)
    kept = Scored(full.after(10), BLOCK, answered=10).keep(
        settings_of(json.dumps({"compress": preset, "lookahead": 10}), 0.2)
    )
    (mine,) = compare(reader, LONG, full.after(10), [kept], full)
    assert mine.tokens == theirs
    assert mine.tokens != full.tokens  # or nothing was told apart


def test_a_hybrid_reads_and_answers_as_transformers_and_keeps_its_windows(tmp_path):
    folder = make("gemma3", tmp_path)
    reader = Reader(folder)
    reader.stops, reader.tokenizer = set(), Numbers()
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        said = own.generate(
            torch.tensor([IDS]), max_new_tokens=24, do_sample=False, eos_token_id=-1
        )
        logits = own(said).logits[0, len(IDS) - 1 : -1]
    prompt = reader.read(IDS, sums=False, earlier=reader.read(IDS[:200], sums=False))
    torch.testing.assert_close(prompt.logits, logits[0], rtol=1e-4, atol=1e-4)
    full = full_answer(reader, LONG, prompt)
    torch.testing.assert_close(full.logits, logits[1:], rtol=1e-4, atol=1e-4)
    windows = [layer for layer, span in enumerate(reader.spans) if span is not None]
    assert 0 < len(windows) < reader.layers
    begun = full.after(10)
    kept = Scored(begun, answered=10).keep(ahead("cake", 10))
    assert kept.tokens < 0.5 * len(IDS) * len(prompt.full_layers)
    for layer in windows:
        span = reader.spans[layer]
        torch.testing.assert_close(kept.keys[layer], begun.keys[layer][:, -span:])
    # Windows alone lose nothing.
    for layer in prompt.full_layers:
        kept.keys[layer], kept.values[layer] = begun.keys[layer], begun.values[layer]
    (made,) = compare(reader, LONG, begun, [kept], full)
    assert made.same
    assert made.mean_kl == pytest.approx(0.0, abs=1e-5)


def test_a_chat_with_a_model_that_has_no_template_is_refused():
    class Base(Numbers):
        chat_template = None

        def encode(self, text):
            return [len(text)]

    assert encode(Base(), [{"role": "assistant", "content": "gone on with"}]) == [12]
    with pytest.raises(SystemExit, match="needs a model with a chat template"):
        encode(Base(), [{"role": "user", "content": "asked"}])


def test_the_rules_table_is_of_what_the_full_cache_obeys():
    def line(item, method, **rules):
        return {
            "task": "t", "item": item, "group": None, "seed": 0, "method": method, "budget": 0.2,
            "rules": rules,
        }  # fmt: skip

    table = obeyed(
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
    assert obeyed([]) == ""
