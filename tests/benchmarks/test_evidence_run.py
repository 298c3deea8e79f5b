"""A run of the benchmark that reads a prompt once: it goes on where it stopped, and its tables."""

import json
import lzma

import pytest

from benchmarks.evidence import __main__ as evidence
from benchmarks.evidence import report
from benchmarks.evidence.cells import read
from benchmarks.evidence.parts import parts_of
from benchmarks.evidence.reader import Reader
from benchmarks.evidence.texts import text_items
from benchmarks.evidence.variants import AT_ONCE, VARIANTS
from checkpoints import talking
from vllm_kvcompress.compare.tasks import build_items
from vllm_kvcompress.methods.presets import PRESETS, RECOMMENDED
from vllm_kvcompress.settings.config import CompressionConfig


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    return talking(tmp_path_factory.mktemp("models"), demo_model)


def run(model, out, *methods, count=2):
    asked = ["--model", model, "--tasks", "texts", "--tokens", "200", "--count", str(count)]
    asked += ["--methods", *methods, "--budgets", "0.5", "0.3", "--threads", "1", "--out", str(out)]
    evidence.main(asked)
    return [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]


def test_a_run_goes_on_where_it_stopped(model, tmp_path):
    out = tmp_path / "results.jsonl"
    first = run(model, out, "cake", count=1)
    assert [(line["method"], line["budget"]) for line in first] == [
        ("full", 1.0), ("cake", 0.3), ("cake", 0.5),
    ]  # fmt: skip
    with out.open("a") as file:
        file.write('{"model": "cut o\n')
    again = run(model, out, "cake", 'other={"scorer": "tova"}')
    keys = [(line["item"], line["method"], line["budget"]) for line in again]
    assert len(set(keys)) == len(keys) == 2 * (1 + 2 * 2)
    assert again[: len(first)] == first
    assert run(model, out, "cake", 'other={"scorer": "tova"}') == again


def test_tables_and_picture_of_a_run(model, tmp_path):
    out = tmp_path / "results.jsonl"
    run(model, out, "snapkv", AT_ONCE, "chunks of 5=" + VARIANTS["chunks of 5"])
    report.main([str(out), "--out", str(tmp_path / "evidence")])
    text = (tmp_path / "evidence.md").read_text()
    assert f"**`{AT_ONCE}`**" in text
    assert "| `snapkv` |" in text
    document = json.loads((tmp_path / "evidence.json").read_text())
    found = {(cell["task"], cell["method"], cell["budget"]) for cell in document["cells"]}
    assert ("texts", "snapkv", 0.3) in found
    assert all(cell["score"] is None and cell["kl"]["prompts"] == 2 for cell in document["cells"])
    assert (tmp_path / "evidence.png").read_bytes().startswith(b"\x89PNG")
    packed = tmp_path / "results.jsonl.xz"
    packed.write_bytes(lzma.compress(out.read_bytes()))
    assert read([out, packed]) == read([out])


@pytest.mark.parametrize("task", ["secret", "tool-call"])
def test_parts_are_found_as_a_server_finds_them(model, task):
    reader = Reader(model)
    (item,) = build_items(
        [task], count=1, tokens=900, seed=0, question="last", count_tokens=reader.count_tokens,
        questions_per_text=1,
    )  # fmt: skip
    ids = reader.encode(item.messages, item.tools)
    parts = parts_of(reader.tokenizer, item, ids)
    said = {
        word: "".join(reader.tokenizer.decode(ids[start:stop]) for start, stop in spans)
        for word, spans in parts.items()
    }
    for word, role in (("system", "system"), ("question", "user")):
        texts = [each["content"].strip() for each in item.messages if each["role"] == role]
        assert bool(texts) is bool(said[word])
        for text in texts[-1:]:
            # of a long question its ends
            assert text[:60] in said[word]
            assert text[-60:] in said[word]
    # the demo's template has no place for tools
    assert not said["tools"]


def test_what_is_protected_is_kept_beside_the_others_share(model, tmp_path):
    out = tmp_path / "results.jsonl"
    protected = '{"compress": "snapkv", "protect": "system"}'
    asked = ["--model", model, "--tasks", "instructions", "--tokens", "400", "--count", "1"]
    asked += ["--methods", "snapkv", f"kept={protected}", "--budgets", "0.3", "--threads", "1"]
    evidence.main([*asked, "--out", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    plain, kept = (line for line in lines if line["method"] != "full")
    assert (plain["method"], kept["method"]) == ("snapkv", "kept")
    assert plain["kept"] + 0.1 < kept["kept"] < 0.6


def test_ordinary_requests_with_and_without_a_look_ahead(model, tmp_path):
    out = tmp_path / "results.jsonl"
    asked = ["--model", model, "--tasks", "summary", "--question", "first", "--tokens", "300"]
    asked += ["--max-tokens", "12", "--threads", "1", "--out", str(out), "--budgets", "0.3"]
    some = ["cake", 'ahead={"compress": "cake", "lookahead": 4}']
    some += ['never={"compress": "cake", "lookahead": 32, "budget": 0.5}']
    evidence.main([*asked, "--count", "1", "--forced", "--methods", *some])
    evidence.main([*asked, "--count", "2", "--methods", *some])
    full, cake, ahead, never, *others = map(json.loads, out.read_text().splitlines())
    assert full["method"] == "full"
    assert [each["method"] for each in others] == ["full", "cake", "ahead", "never"]
    for each in (cake, ahead, never):
        assert len(each["kl_at"]) == len(each["agreed_at"]) == each["full_length"] - 1
    assert cake["kl_at"][0] > 0
    assert ahead["kl_at"][:4] == [0.0] * 4
    assert max(ahead["kl_at"][4:]) > 0
    assert (cake["packed"], ahead["packed"], never["packed"]) == (True, True, False)
    assert (never["budget"], never["kept"], never["same"], never["kl"]) == (0.5, 1.0, True, 0.0)
    assert cake["kept"] == pytest.approx(ahead["kept"], abs=0.04)
    assert not any("similarity" in each for each in (cake, ahead, never))
    assert all("similarity" in each for each in others[1:])
    report.main([str(out), "--out", str(tmp_path / "evidence")])
    text = (tmp_path / "evidence.md").read_text()
    assert "ordinary requests, 2 prompts:" in text
    assert "| `ahead` | 0.3 |" in text


def test_texts_fill_their_length_and_follow_from_their_seed():
    def count(text):
        return len(text.split())

    made = text_items(count=3, tokens=150, seed=5, count_tokens=count)
    assert [count(item.messages[0]["content"]) for item in made] == [150] * 3
    assert made == text_items(count=3, tokens=150, seed=5, count_tokens=count)
    assert made != text_items(count=3, tokens=150, seed=6, count_tokens=count)


def test_the_recommended_preset_is_the_one_whose_parts_are_exchanged():
    parsed = {name: CompressionConfig.parse(json.loads(raw)) for name, raw in VARIANTS.items()}
    ours = CompressionConfig.parse({"compress": RECOMMENDED, "lookahead": 0})
    base = parsed.pop(AT_ONCE)
    for part in ("build_allocator", "build_scorer", "build_selector"):
        assert getattr(base, part)() == getattr(ours, part)()
    assert base.resolved_window == ours.resolved_window
    assert RECOMMENDED in PRESETS

    def built(config):
        parts = (config.build_allocator(), config.build_scorer(), config.build_selector())
        return *parts, config.resolved_window

    # each differs, in the one part or parameter that its name says
    for name, other in parsed.items():
        pairs = zip(built(base), built(other), strict=True)
        assert sum(one != its for one, its in pairs) == 1, name


def test_rules_are_judged_beside_the_full_caches(model, tmp_path):
    """With tools, calls and their results, as the template takes them."""
    out = tmp_path / "results.jsonl"
    asked = ["--model", model, "--tasks", "secret", "tool-call", "--tokens", "1000", "--count", "1"]
    asked += ["--methods", "snapkv", "--budgets", "0.5", "--max-tokens", "4", "--threads", "1"]
    evidence.main([*asked, "--out", str(out)])
    lines = read([out])
    secret = [line for line in lines if line["task"] == "secret"]
    # what says nothing tells no secret, and calls no tool: nothing is known of such a prompt
    assert [(line["method"], line["score"]) for line in secret] == [("full", 1.0), ("snapkv", 1.0)]
    assert secret[1]["rules"] == {"secret kept": [True, True]}
    called = [line for line in lines if line["task"] == "tool-call"]
    assert {(line["method"], line["score"]) for line in called} == {("full", 0.0)}
    report.main([str(out), "--out", str(tmp_path / "evidence")])
    text = (tmp_path / "evidence.md").read_text()
    assert "| rule | prompts | `snapkv` 0.5 |\n" in text
    assert "| secret | 1 | 100% (100% to 100%) |\n" in text
    assert "The uncompressed model gets right, at least in part: `secret` 1 of 1" in text
