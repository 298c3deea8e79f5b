"""Results of ``kvcompress compare`` on a fake server."""

import dataclasses
import json
import os
import shutil
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from fake_vllm import read_report, write_prompts
from vllm_kvcompress.compare import server
from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.compare.report import TABLES
from vllm_kvcompress.serving import process


def cells(report):
    return {(c["method"], c["budget"]): c for c in report["cells"]}


def test_compare_measures_what_each_method_loses(run_compare, tmp_path):
    result = run_compare("--max-drop 0.3 --json")
    report = json.loads(result.out)
    assert result.status == 0, result.err
    assert report == read_report(tmp_path)
    assert report["complete"]
    bad, good = cells(report)["snapkv", 0.2], cells(report)["cake", 0.2]
    assert (bad["compressed"], bad["asked"]) == (10, 10)
    assert bad["kept"] == pytest.approx(0.2)
    assert (bad["exact"]["mean"], bad["diverged"]) == (0.5, 2)
    assert bad["similarity"]["mean"] == pytest.approx((1 + 2 / 8) / 2)
    assert (bad["drop"]["mean"], bad["full_score"]["mean"]) == (0.5, 1.0)
    # Five outputs share two tokens and differ at the third. The first token is never counted.
    assert bad["places"] == 5 * 7 + 5 * 2
    assert bad["same_first"]["mean"] == pytest.approx(40 / 45)
    assert (good["exact"]["mean"], good["drop"]["mean"], good["kl"]["mean"]) == (1, 0, 0)
    cell = Cell(method="cake", budget=0.2)
    assert report["recommendation"]["cell"] == dataclasses.asdict(cell)
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "**Run cake 0.2" in markdown
    assert "| snapkv | 0.2 | 10 of 10 | 20.0% | 20% | 0.500 (<= " in markdown


def test_each_method_runs_with_every_lookahead_and_protection(run_compare, fake, tmp_path):
    result = run_compare(
        "--methods snapkv --budgets 0.2 --lookaheads 0,32 --protect 'tools, system'"
        " --no-baselines --keep-text",
        numbers=range(2),
    )
    assert "snapkv ahead 32" in result.out
    # Names wrap, and no figure is cut.
    assert "…" not in result.out
    assert "+ system, tools" in " ".join(result.out.split())
    requested = [b["vllm_xargs"] for b in fake.prompt_requests]
    each = {"kv_compress": "snapkv", "kv_budget": 0.2}
    full = {"kv_compress": "off"}
    ways = [
        each | {"kv_protect": parts, "kv_lookahead": tokens}
        for tokens in (0, 32)
        for parts in ("none", "system,tools")
    ]
    assert all(requested.count(xargs) == 2 for xargs in [full, *ways])
    assert len(requested) == 2 * (1 + 4)
    found = [
        (c["lookahead"], c["protect"], c["asked"], c["compressed"])
        for c in read_report(tmp_path)["cells"]
    ]
    assert found == [(way["kv_lookahead"], way["kv_protect"], 2, 2) for way in ways]
    texts = (tmp_path / "out" / "texts.jsonl").read_text().splitlines()
    cells = {f"snapkv ahead {n}{parts} 0.2" for n in (0, 32) for parts in ("", " + system,tools")}
    assert {json.loads(line)["cell"] for line in texts} == {"off", *cells}


def test_every_request_is_greedy_and_misses_the_prefix_cache(run_compare, fake):
    run_compare()
    assert len(fake.prompt_requests) == 10 * 5
    assert {b["temperature"] for b in fake.prompt_requests} == {0}
    assert len({b["cache_salt"] for b in fake.prompt_requests}) == 50
    full = [b for b in fake.prompt_requests if b["vllm_xargs"]["kv_compress"] == "off"]
    assert len(full) == 10


def test_prompts_and_outputs_are_neither_saved_nor_printed(run_compare, tmp_path):
    result = run_compare()
    files = [p.read_bytes() for p in (tmp_path / "out").iterdir()]
    assert files
    # All eight digits of the output: shorter runs of ones occur in timings and in the chart.
    assert not any(b"secret" in content or b"11111111" in content for content in files)
    assert "secret" not in result.out + result.err


def test_keep_text_saves_prompts_and_outputs_for_the_owner_only(run_compare, tmp_path):
    run_compare("--keep-text")
    texts = tmp_path / "out" / "texts.jsonl"
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    assert texts.stat().st_mode & 0o077 == 0
    cells = {"off", "cake 0.5", "cake 0.2", "snapkv 0.5", "snapkv 0.2"}
    assert {line["cell"] for line in lines} == cells
    assert {line["text"] for line in lines if line["cell"] == "off"} >= {"11111111"}


@pytest.mark.parametrize("kind", ["mode", "link", "pipe", "folder", "owner"])
def test_texts_are_not_kept_where_others_may_read_them(
    run_compare, fake, tmp_path, monkeypatch, kind
):
    texts, elsewhere = tmp_path / "out" / "texts.jsonl", tmp_path / "elsewhere"
    texts.parent.mkdir()
    elsewhere.touch(0o600)
    if kind == "mode":
        texts.touch()
        texts.chmod(0o644)
    elif kind == "owner":
        texts.touch(0o600)
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    elif kind == "link":
        texts.symlink_to(elsewhere)
    else:
        os.mkfifo(texts, 0o600) if kind == "pipe" else texts.mkdir()
    result = run_compare("--keep-text")
    assert result.status == 2
    found = {
        "mode": "got mode 0644; run chmod 600 out/texts.jsonl, or use another --out",
        "link": "got a symbolic link; remove it, or use another --out",
        "owner": f"got a file of user {os.getuid()}; remove it, or use another --out",
    }.get(kind, "got something else; remove it, or use another --out")
    rule = "--keep-text saves prompts, so out/texts.jsonl must be a regular file that only you can"
    assert f"kvcompress: error: {rule} read, {found}\n" in result.err
    assert fake.requests == []
    assert elsewhere.read_text() == ""
    assert [path.name for path in texts.parent.iterdir()] == ["texts.jsonl"]


def test_reports_of_kept_texts_are_new_files_for_the_owner_only(run_compare, fake, tmp_path):
    """They may quote prompts: the server's reason does. Old files and links are replaced."""
    fake.refused_text, elsewhere = "secret 3", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/report.json").touch(0o644)
    (tmp_path / "out/report.md").symlink_to(elsewhere)
    run_compare("--keep-text")
    reports = [tmp_path / f"out/report.{suffix}" for suffix in ("json", "md", "png")]
    assert [path.lstat().st_mode & 0o170777 for path in reports] == [0o100600] * 3
    assert "no: secret" in reports[1].read_text()
    assert elsewhere.read_text() == "mine"
    run_compare("--out second")
    assert (tmp_path / "second/report.md").stat().st_mode & 0o044


def test_a_full_score_of_0_gives_neither_recommendation_nor_chart(run_compare, tmp_path):
    """Scores of 0 cannot fall, so even the worst method would have no loss."""
    assert run_compare("--max-drop 0.1", numbers=range(40)).status == 0
    assert (tmp_path / "out/report.png").exists()
    write_prompts(tmp_path / "mine.jsonl", range(40), answer="never said")
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/report.png").touch()
    result = run_compare("--max-drop 0.1", numbers=None)
    assert result.status == 1
    reason = "the full cache scores 0 on every prompt, so its score cannot fall."
    assert f"No recommendation: {reason}" in result.out
    assert f"kvcompress: no chart: {reason} Correct the answers or match" in result.err
    assert not (tmp_path / "out/report.png").exists()
    assert {cell["loss"] for cell in read_report(tmp_path)["cells"]} == {None}
    assert run_compare("--max-drop 0.1 --by similarity", numbers=None).status == 0
    assert (tmp_path / "out/report.png").exists()


def test_without_sizes_there_is_no_chart(run_compare, fake, tmp_path):
    fake.reports_usage = False
    result = run_compare("--budgets 4,8 --no-baselines")
    assert "no chart: no result has both a quality and a share of kept tokens; see" in result.err
    assert not (tmp_path / "out/report.png").exists()


def test_without_kv_usage_the_number_of_compressed_prompts_is_unknown(run_compare, fake, tmp_path):
    fake.reports_usage = False
    result = run_compare("--max-drop 0.3")
    assert (result.status, cells(read_report(tmp_path))["cake", 0.2]["compressed"]) == (0, None)
    assert "? of 10" in result.out
    assert "start it with --kv-usage" in " ".join(result.out.split())


@pytest.mark.parametrize("usage", [True, False])
def test_report_warns_if_no_prompt_was_compressed(run_compare, fake, tmp_path, usage):
    """With and without --kv-usage: the server's counters show it in both cases."""
    fake.min_prompt, fake.reports_usage = 1000, usage
    result = run_compare("--max-drop 0.3")
    output = " ".join(result.out.split())
    assert (
        "WARNING: the server compressed no prompt with cake 0.5, cake 0.2, snapkv 0.5, snapkv 0.2."
        " It never compresses prompts of fewer than 1,000 tokens. It also skips prompts whose"
        " output ends within the method's look-ahead."
    ) in output
    assert cells(read_report(tmp_path))["cake", 0.2]["compressed"] == 0
    assert result.status == 1


def test_fewer_or_no_log_probabilities_are_accepted(run_compare, fake, tmp_path):
    fake.max_logprobs = 5
    run_compare()
    assert "allows 5 top log-probabilities per position" in str(read_report(tmp_path)["notes"])
    assert cells(read_report(tmp_path))["snapkv", 0.2]["kl"]["mean"] > 0
    result = run_compare("--no-kl")
    assert result.status == 2
    assert "holds a run with different kl" in result.err
    result = run_compare("--no-kl --out other")
    report = read_report(tmp_path, "other")
    assert (cells(report)["snapkv", 0.2]["kl"], cells(report)["snapkv", 0.2]["places"]) == (None, 0)


def test_a_refused_prompt_is_in_no_figure(run_compare, fake, tmp_path):
    fake.refused_text = " 7"
    result = run_compare()
    assert (
        "The server refused 1 of 10 prompts (status 400). The figures leave them out. Add"
        " --keep-text to see the reason."
    ) in result.out
    assert "secret" not in result.out
    assert cells(read_report(tmp_path))["cake", 0.2]["asked"] == 9
    assert not read_report(tmp_path)["complete"]


def test_copies_of_a_prompt_count_as_one_independent_prompt(run_compare, tmp_path):
    result = run_compare(numbers=[2] * 10)
    assert cells(read_report(tmp_path))["cake", 0.2]["asked"] == 10
    assert "No recommendation: 1 independent prompt is too few to confirm a drop" in result.out


def test_a_run_cannot_be_resumed_with_other_answers_or_server_settings(run_compare, fake, tmp_path):
    """The report would mix results of both without saying so."""
    run_compare()
    journal = tmp_path / "out" / "journal.jsonl"
    before, min_prompt = journal.read_bytes(), fake.min_prompt
    fake.min_prompt += 1
    result = run_compare()
    assert (result.status, "different server settings" in result.err) == (2, True), result.err
    fake.min_prompt = min_prompt
    assert run_compare().status == 1
    mine = tmp_path / "mine.jsonl"
    write_prompts(mine, range(10))
    bodies = [json.loads(line) for line in mine.read_text().splitlines()]
    for correction in ({"answer": "another"}, {"match": "any"}):
        corrected = [{**body, **correction} for body in bodies]
        mine.write_text("".join(json.dumps(body) + "\n" for body in corrected))
        result = run_compare(numbers=None)
        assert (result.status, "different prompts" in result.err) == (2, True), result.err
    assert journal.read_bytes() == before


def test_tables_fit_80_columns_without_cutting_names(run_compare, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    tables = [line for line in run_compare().out.splitlines() if line.startswith(" ")]
    assert max(map(len, tables)) <= 80
    assert sum(line.split()[:2] == ["snapkv", "0.2"] for line in tables) == len(TABLES)


def test_model_names_with_markup_are_printed_and_drawn(run_compare, fake, tmp_path):
    fake.responses["/v1/models"] = 200, json.dumps({"data": [{"id": "[/b] $\\frac$"}]})
    assert "on [/b] $\\frac$: 10 prompts" in run_compare().out
    assert (tmp_path / "out" / "report.png").stat().st_size > 10_000


def test_progress_is_logged_without_a_terminal(run_compare):
    lines = [line for line in run_compare().err.splitlines() if line.endswith("are done.")]
    assert lines == [f"{count} of 40 results are done." for count in range(4, 41, 4)]


def test_without_matplotlib_only_the_chart_is_missing(run_compare, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    result = run_compare("--methods snapkv --budgets 0.2")
    assert result.status == 1
    assert "no chart, because matplotlib is missing; pip install matplotlib" in result.err
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"report.json", "report.md", "journal.jsonl", "run.json"}


def test_built_in_tasks_run_with_one_question_per_text(compare, fake, tmp_path):
    tasks = "--tasks niah-single,key-values --length 400 --count 2"
    result = compare(f"--url {fake.url} {tasks} --methods cake,snapkv --budgets 0.5,0.2")
    assert result.status == 1, result.err
    assert cells(read_report(tmp_path))["cake", 0.2]["asked"] == 4
    assert set(cells(read_report(tmp_path))["cake", 0.2]["tasks"]) == {"niah-single", "key-values"}
    assert cells(read_report(tmp_path))["cake", 0.2]["score"]["independent"] == 4
    # The fake server answers none of these questions.
    assert "No recommendation: the full cache scores 0 on every prompt" in result.out
    begun = [b for b in fake.prompt_requests if b["messages"][-1]["role"] == "assistant"]
    assert begun
    assert all(b["continue_final_message"] and not b["add_generation_prompt"] for b in begun)
    assert "Score by task" in (tmp_path / "out" / "report.md").read_text()


def test_earlier_turns_are_sent_first_with_the_same_cache_salt(compare, fake):
    tasks = "--tasks two-turns --length 200 --count 2"
    compare(f"--url {fake.url} {tasks} --methods cake --budgets 0.5 --no-baselines")
    by_salt: dict[str, list] = {}
    for body in fake.prompt_requests:
        by_salt.setdefault(body["cache_salt"], []).append(body)
    turns = [bodies for bodies in by_salt.values() if len(bodies) == 2]
    assert len(turns) == 2 * 2
    for first, second in turns:
        assert first["messages"] == second["messages"][:1]
        assert "continue_final_message" not in first
        assert second["continue_final_message"]
        assert first["vllm_xargs"] == second["vllm_xargs"]


def test_budgets_may_name_the_format_of_kept_tokens(run_compare, fake, tmp_path):
    """The other budgets then have the KV cache's dtype."""
    fake.allowed_methods += ["random"]
    result = run_compare("--methods cake --max-drop 0.3 --budgets 0.2,0.6:k4v3")
    assert result.status == 0, result.err
    report = read_report(tmp_path)
    formats = [(0.2, "auto"), (0.6, "k4v3")]
    assert [(c["method"], c["budget"], c["packed_dtype"]) for c in report["cells"]] == [
        (method, *kept) for method in ("cake", "random") for kept in formats
    ]
    sent = [body["vllm_xargs"] for body in fake.prompt_requests]
    named = {(xargs.get("kv_budget"), xargs.get("kv_packed_dtype")) for xargs in sent}
    assert named == {(None, None), *formats}
    # 0.6 in k4v3 takes less memory than 0.2 in 16 bits.
    assert "Run cake k4v3 0.6, which keeps" in report["recommendation"]["sentence"]
    assert "| cake auto | 0.2 |" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(("formats", "expected"), [(("auto", "k4v3"), True), (("", ""), False)])
def test_a_started_server_packs_in_k4v3_if_a_cell_does(formats, expected, monkeypatch, tmp_path):
    @contextmanager
    def serve(model, flags, log, **_):
        commands.append(flags)
        yield SimpleNamespace(url="http://127.0.0.1:1")

    commands: list[list[str]] = []
    monkeypatch.setattr(process, "serve", serve)
    cells = [Cell(method="cake", budget=0.5, packed_dtype=name) for name in formats]
    with server.start(tmp_path, ["--max-model-len", "99"], cells, tmp_path / "log"):
        pass
    (flags,) = commands
    assert ("--kv-packed-dtype k4v3" in " ".join(flags)) is expected
    assert flags[-2:] == ["--max-model-len", "99"]


def test_tools_are_sent_with_tool_choice_none(run_compare, fake, tmp_path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    line = {"messages": [{"role": "user", "content": "7"}], "tools": [tool], "tool_choice": "auto"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(line))
    run_compare(numbers=None)
    assert {json.dumps(body["tools"]) for body in fake.prompt_requests} == {json.dumps([tool])}
    assert {body["tool_choice"] for body in fake.prompt_requests} == {"none"}
