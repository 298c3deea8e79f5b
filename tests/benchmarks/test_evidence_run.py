"""The evidence command continues an interrupted run, and its report has all tables."""

import json
import lzma

import pytest

from benchmarks.evidence import __main__ as evidence
from benchmarks.evidence import report
from benchmarks.evidence.cells import cells, read
from benchmarks.evidence.systems import WITHOUT_LOOKAHEAD
from benchmarks.evidence.texts import text_items
from checkpoints import text_checkpoint


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    return text_checkpoint(tmp_path_factory.mktemp("models"), demo_model)


def run(model, out, *methods, count=2):
    argv = ["--model", model, "--tasks", "texts", "--tokens", "200", "--count", str(count)]
    argv += ["--methods", *methods, "--budgets", "0.5", "0.3", "--threads", "1", "--out", str(out)]
    evidence.main(argv)
    return [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]


def test_an_interrupted_run_continues(model, tmp_path):
    out = tmp_path / "results.jsonl"
    first = run(model, out, "cake", count=1)
    assert [(line["method"], line["budget"]) for line in first] == [
        ("full", 1.0), ("cake", 0.3), ("cake", 0.5),
    ]  # fmt: skip
    with out.open("a") as file:
        file.write('{"model": "incomple\n')
    again = run(model, out, "cake", 'other={"scorer": "tova"}')
    keys = [(line["item"], line["method"], line["budget"]) for line in again]
    assert len(set(keys)) == len(keys) == 2 * (1 + 2 * 2)
    assert again[: len(first)] == first
    assert run(model, out, "cake", 'other={"scorer": "tova"}') == again


def test_the_report_writes_tables(model, tmp_path):
    out = tmp_path / "results.jsonl"
    run(model, out, "snapkv", WITHOUT_LOOKAHEAD)
    report.main([str(out), "--out", str(tmp_path / "evidence")])
    text = (tmp_path / "evidence.md").read_text()
    assert f"**`{WITHOUT_LOOKAHEAD}`**" in text
    assert "| `snapkv` |" in text
    found = cells(read([out]))
    assert ("texts", "snapkv", 0.3) in {(cell.task, cell.method, cell.budget) for cell in found}
    assert all(cell.score is None and cell.kl.prompts == 2 for cell in found)
    compressed = tmp_path / "results.jsonl.xz"
    compressed.write_bytes(lzma.compress(out.read_bytes()))
    assert read([out, compressed]) == read([out])


def test_protected_parts_are_refused(model, tmp_path):
    with pytest.raises(SystemExit, match=r"not measured here, got 'system'.*compare --protect"):
        run(model, tmp_path / "results.jsonl", 'kept={"compress": "snapkv", "protect": "system"}')


def test_ordinary_requests_diverge_only_after_the_look_ahead(model, tmp_path):
    out = tmp_path / "results.jsonl"
    argv = ["--model", model, "--tasks", "summary", "--question", "first", "--tokens", "300"]
    argv += ["--max-tokens", "12", "--threads", "1", "--out", str(out), "--budgets", "0.3"]
    methods = ["cake", 'ahead={"compress": "cake", "lookahead": 4}']
    methods += ['never={"compress": "cake", "lookahead": 32, "budget": 0.5}']
    evidence.main([*argv, "--count", "1", "--forced", "--methods", *methods])
    evidence.main([*argv, "--count", "2", "--methods", *methods])
    full, cake, ahead, never, *second_run = map(json.loads, out.read_text().splitlines())
    assert full["method"] == "full"
    assert [line["method"] for line in second_run] == ["full", "cake", "ahead", "never"]
    for line in (cake, ahead, never):
        assert len(line["kl_at"]) == len(line["agreed_at"]) == line["full_length"] - 1
    assert cake["kl_at"][0] > 0
    assert ahead["kl_at"][:4] == [0.0] * 4
    assert max(ahead["kl_at"][4:]) > 0
    assert (cake["packed"], ahead["packed"], never["packed"]) == (True, True, False)
    assert (never["budget"], never["kept"], never["same"], never["kl"]) == (0.5, 1.0, True, 0.0)
    assert cake["kept"] == pytest.approx(ahead["kept"], abs=0.04)
    assert not any("similarity" in line for line in (cake, ahead, never))
    assert all("similarity" in line for line in second_run[1:])
    report.main([str(out), "--out", str(tmp_path / "evidence")])
    text = (tmp_path / "evidence.md").read_text()
    assert "ordinary requests, 2 prompts:" in text
    assert "| `ahead` | 0.3 |" in text


def test_formats_are_compared_by_bytes(demo_model, tmp_path):
    model = text_checkpoint(tmp_path, demo_model, "llama-mqa")
    out = tmp_path / "results.jsonl"
    argv = ["--model", model, "--tasks", "summary", "--tokens", "300", "--budgets", "0.5"]
    argv += ["--max-tokens", "44", "--count", "1", "--forced", "--threads", "1"]
    packed = '{"compress": "cake-chunk", "packed_dtype": "k4v3", "budget": [1.0, 0.5]}'
    evicting = '{"compress": "cake-chunk", "cache": "fp8", "budget": 0.5}'
    within = '{"compress": "cake", "bytes": [0.6, 0.3]}'
    methods = ["cake", f"packed={packed}", f"evicting={evicting}", "fp8", "turboquant_k8v4"]
    methods += [f"within={within}"]
    evidence.main([*argv, "--out", str(out), "--methods", *methods])
    lines = {(line["method"], line["budget"]): line for line in read([out]) if "kl" in line}
    assert set(lines) == {
        ("cake", 0.5), ("fp8", 1.0), ("turboquant_k8v4", 1.0), ("packed", 0.5), ("packed", 1.0),
        ("evicting", 0.5), ("within", 0.6), ("within", 0.3),
    }  # fmt: skip
    for share in (0.6, 0.3):  # as many blocks of 16 tokens as fit, of about 300 tokens
        assert share - 0.06 < lines["within", share]["bytes"] <= share
    assert lines["fp8", 1.0]["bytes"] == 0.5
    # A third of the layers, the middle one, has 8-bit keys and 4-bit values with a scale.
    assert lines["turboquant_k8v4", 1.0]["bytes"] == pytest.approx((2 + 100 / 256) / 3, abs=1e-5)
    assert lines["cake", 0.5]["bytes"] == pytest.approx(lines["cake", 0.5]["kept"], abs=1e-5)
    # The first block and the last 32 tokens or more of about 300 are in 16 bits.
    assert 0.35 < lines["packed", 1.0]["bytes"] < 0.43
    assert lines["packed", 1.0]["kept"] == 1.0
    assert 0.24 < lines["packed", 0.5]["bytes"] < 0.33
    assert 0.25 < lines["evicting", 0.5]["bytes"] < 0.35
    assert all(len(line["kl_at"]) == 43 for line in lines.values())
    for name in ("packed", "evicting"):
        assert lines[name, 0.5]["kl_at"][:32] == [0.0] * 32
    assert max(lines["fp8", 1.0]["kl_at"]) > 0
    report.main([str(out), "--pooled", "--out", str(tmp_path / "formats")])
    text = (tmp_path / "formats.md").read_text()
    pooled = text.split("question first and last together\n")[1]
    assert "ordinary requests, 1 prompts, by bytes:" in pooled
    assert "| `cake`, 0.5 | `fp8`, 1 | 1 | 12 |" in pooled
    table = text.split("ordinary requests, 1 prompts, by bytes:\n\n")[1]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert rows[0] == ["method", "budget", "bytes", "KL", "equal tokens"]
    shares = [float(row[2]) for row in rows[2:10]]
    assert shares == sorted((round(line["bytes"], 3) for line in lines.values()), reverse=True)
    assert [row[0] for row in rows[2:5]] == ["`turboquant_k8v4`", "`within`", "`fp8`"]


def test_an_unknown_cache_format_is_an_error(model, tmp_path):
    with pytest.raises(SystemExit, match=r"must be one of fp8, .*; got 'fp7'"):
        run(model, tmp_path / "results.jsonl", 'low={"compress": "cake", "cache": "fp7"}')


def test_texts_have_the_requested_length_and_depend_on_the_seed():
    def count(text):
        return len(text.split())

    items = text_items(count=3, tokens=150, seed=5, count_tokens=count)
    assert [count(item.messages[0]["content"]) for item in items] == [150] * 3
    assert items == text_items(count=3, tokens=150, seed=5, count_tokens=count)
    assert items != text_items(count=3, tokens=150, seed=6, count_tokens=count)


def test_rules_are_scored_for_both_caches(model, tmp_path):
    """The prompts have tools, tool calls and tool results."""
    out = tmp_path / "results.jsonl"
    argv = ["--model", model, "--tasks", "secret", "tool-call", "--tokens", "1000", "--count", "1"]
    argv += ["--methods", "snapkv", "--budgets", "0.5", "--max-tokens", "4", "--threads", "1"]
    evidence.main([*argv, "--out", str(out)])
    lines = read([out])
    secret = [line for line in lines if line["task"] == "secret"]
    # The test model writes nothing useful: it reveals no secret and calls no tool. The full cache
    # fails tool-call, so compressed caches are not measured there.
    assert [(line["method"], line["score"]) for line in secret] == [("full", 1.0), ("snapkv", 1.0)]
    assert secret[1]["rules"] == {"secret kept": [True, True]}
    called = [line for line in lines if line["task"] == "tool-call"]
    assert {(line["method"], line["score"]) for line in called} == {("full", 0.0)}
    report.main([str(out), "--out", str(tmp_path / "evidence")])
    text = (tmp_path / "evidence.md").read_text()
    assert "| rule | prompts | `snapkv` 0.5 |\n" in text
    assert "| secret | 1 | 100% (100% to 100%) |\n" in text
    assert "The uncompressed model gets right, at least in part: `secret` 1 of 1" in text
