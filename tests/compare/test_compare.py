"""``kvcompress compare`` on a server that only says what a test wants: what it finds."""

import json
import sys

import pytest

from fake_vllm import write_prompts
from vllm_kvcompress.compare.report import TABLES

CELLS = ["--methods", "cake,snapkv", "--budgets", "0.5,0.2"]


@pytest.fixture
def asked(compare, fake, tmp_path):
    """Compare ten prompts; further flags may follow."""

    def asking(*more, numbers=range(10)):
        if numbers is not None:
            write_prompts(tmp_path / "mine.jsonl", numbers)
        return compare("--url", fake.url, "--prompts", "mine.jsonl", *CELLS, *more)

    return asking


def report(tmp_path):
    return json.loads((tmp_path / "out" / "report.json").read_text())


def cells(found):
    return {(c["method"], c["budget"]): c for c in found["cells"]}


def test_it_finds_what_each_method_forgets(asked, tmp_path):
    done = asked("--max-drop", "0.3", "--json")
    found = json.loads(done.out)
    assert done.status == 0, done.err
    assert found == report(tmp_path)
    assert found["complete"]
    bad, good = cells(found)["snapkv", 0.2], cells(found)["cake", 0.2]
    assert (bad["compressed"], bad["asked"]) == (10, 10)
    assert bad["kept"] == pytest.approx(0.2)
    assert (bad["exact"]["mean"], bad["diverged"]) == (0.5, 2)
    assert bad["similarity"]["mean"] == pytest.approx((1 + 2 / 8) / 2)
    assert (bad["drop"]["mean"], bad["full_score"]["mean"]) == (0.5, 1.0)
    # five answers share two tokens and part at the third; the first is never counted
    assert bad["places"] == 5 * 7 + 5 * 2
    assert bad["same_first"]["mean"] == pytest.approx(40 / 45)
    assert (good["exact"]["mean"], good["drop"]["mean"], good["kl"]["mean"]) == (1, 0, 0)
    assert found["recommendation"]["cell"] == {
        "method": "cake",
        "budget": 0.2,
        "protect": "",
        "lookahead": None,
    }
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "**Run cake 0.2" in markdown
    assert "| snapkv | 0.2 | 10 of 10 | 20.0% | 0.500 (<= " in markdown


def test_each_method_is_asked_with_every_look_ahead_and_protection(compare, fake, tmp_path):
    write_prompts(tmp_path / "mine.jsonl", range(2))
    done = compare(
        "--url",
        fake.url,
        "--prompts",
        "mine.jsonl",
        "--methods",
        "snapkv",
        "--budgets",
        "0.2",
        "--lookaheads",
        "0,32",
        "--protect",
        "tools, system",
        "--no-baselines",
        "--keep-text",
    )
    assert "snapkv ahead 32" in done.out
    # names take the lines that they need, and no figure is cut off
    assert "…" not in done.out
    assert "+ system, tools" in " ".join(done.out.split())
    asked = [b["vllm_xargs"] for b in fake.prompts]
    each = {"kv_compress": "snapkv", "kv_budget": 0.2, "kv_by_role": True}
    full = {"kv_compress": "off", "kv_by_role": True}
    ways = [
        each | {"kv_protect": parts, "kv_lookahead": tokens}
        for tokens in (0, 32)
        for parts in ("none", "system,tools")
    ]
    asked = [dict(sorted(xargs.items())) for xargs in asked]
    ways, full = [dict(sorted(way.items())) for way in ways], dict(sorted(full.items()))
    assert sorted(map(str, asked)) == sorted(map(str, [full, *ways] * 2))
    assert [
        (c["lookahead"], c["protect"], c["asked"], c["compressed"])
        for c in report(tmp_path)["cells"]
    ] == [(way["kv_lookahead"], way["kv_protect"], 2, 2) for way in ways]
    texts = (tmp_path / "out" / "texts.jsonl").read_text().splitlines()
    assert {json.loads(line)["cell"] for line in texts} == {
        "off",
        "snapkv ahead 0 0.2",
        "snapkv ahead 0 + system,tools 0.2",
        "snapkv ahead 32 0.2",
        "snapkv ahead 32 + system,tools 0.2",
    }


@pytest.mark.parametrize("typed", ["-1", "1.5", "0,many", "³", ","])
def test_look_aheads_are_whole_numbers(asked, fake, typed):
    done = asked("--lookaheads", typed)
    assert done.status == 2
    assert "--lookaheads must" in done.err
    assert not fake.asked


def test_none_within_is_status_1(asked):
    done = asked("--methods", "snapkv", "--budgets", "0.2", "--max-drop", "0.3")
    assert done.status == 1
    assert "No recommendation: no method at any budget keeps the loss by score" in done.out
    assert "0.500" in done.out


def test_every_request_is_greedy_and_computed_in_full(asked, fake):
    asked()
    assert len(fake.prompts) == 10 * 5
    assert {b["temperature"] for b in fake.prompts} == {0}
    assert len({b["cache_salt"] for b in fake.prompts}) == 50
    offs = [b for b in fake.prompts if b["vllm_xargs"]["kv_compress"] == "off"]
    assert len(offs) == 10


def test_nothing_of_prompts_or_answers_is_kept_or_printed(asked, tmp_path):
    done = asked()
    kept = [p.read_bytes() for p in (tmp_path / "out").iterdir()]
    assert kept
    # the whole answer: five ones alone are found now and then in a time or in a picture's point
    assert not any(b"secret" in text or b"11111111" in text for text in kept)
    assert "secret" not in done.out + done.err


def test_texts_are_kept_where_that_is_asked_for(asked, tmp_path):
    asked("--keep-text")
    texts = tmp_path / "out" / "texts.jsonl"
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    assert texts.stat().st_mode & 0o077 == 0
    assert {line["cell"] for line in lines} == {"off", "cake 0.5", "cake 0.2", "snapkv 0.5",
                                                "snapkv 0.2"}  # fmt: skip
    assert {line["text"] for line in lines if line["cell"] == "off"} >= {"11111111"}


def test_it_tells_what_was_kept_of_each_role(asked, fake, tmp_path):
    """Both sides are asked, so that neither has more to do before its first token."""
    done = asked("--methods", "snapkv", "--budgets", "0.5,0.2", "--no-baselines")
    assert {body["vllm_xargs"]["kv_by_role"] for body in fake.prompts} == {True}
    cells = json.loads((tmp_path / "out" / "report.json").read_text())["cells"]
    tokens = cells[0]["asked"] * 11
    told = [cell["roles"]["user"] for cell in cells]
    assert told == [[tokens, pytest.approx(budget)] for budget in (0.5, 0.2)]
    assert any(line.split() == ["snapkv", "0.2", "20%"] for line in done.out.splitlines())
    assert f"| snapkv | 0.2 | 20% of {tokens} |" in (tmp_path / "out" / "report.md").read_text()


def test_without_kv_usage_nothing_is_guessed(asked, fake, tmp_path):
    fake.usage = False
    done = asked("--max-drop", "0.3")
    assert (done.status, cells(report(tmp_path))["cake", 0.2]["compressed"]) == (0, None)
    assert "? of 10" in done.out
    assert "start it with --kv-usage" in " ".join(done.out.split())


@pytest.mark.parametrize("usage", [True, False])
def test_nothing_was_compressed(asked, fake, tmp_path, usage):
    """With and without --kv-usage: the server's counters did not move."""
    fake.least, fake.usage = 1000, usage
    done = asked("--max-drop", "0.3")
    said = " ".join(done.out.split())
    if usage:
        # an answer without a word may be any: but the counters say that there was none
        assert done.status == 1
    assert "WARNING: nothing was compressed by cake 0.5, cake 0.2, snapkv 0.5, snapkv 0.2" in said
    assert "Prompts below 1,000 tokens are. Prompts whose answer ends within" in said
    assert cells(report(tmp_path))["cake", 0.2]["compressed"] == 0
    assert done.status == 1


def test_some_prompts_are_left_whole(compare, fake, tmp_path):
    fake.least = 20
    write_prompts(tmp_path / "short", range(3), words=5)
    write_prompts(tmp_path / "long", range(2), words=30)
    text = (tmp_path / "short").read_text() + (tmp_path / "long").read_text()
    (tmp_path / "mine.jsonl").write_text(text)
    done = compare("--url", fake.url, "--prompts", "mine.jsonl", *CELLS)
    assert "2 of 5" in done.out
    assert cells(report(tmp_path))["snapkv", 0.2]["exact"]["mean"] == 0.5


def test_fewer_likely_tokens_and_none(asked, fake, tmp_path):
    fake.top = 5
    asked()
    assert "gives 5 likely tokens" in str(report(tmp_path)["notes"])
    assert cells(report(tmp_path))["snapkv", 0.2]["kl"]["mean"] > 0
    done = asked("--no-kl")
    assert done.status == 2
    assert "has a run with another kl" in done.err
    done = asked("--no-kl", "--out", "other")
    found = json.loads((tmp_path / "other" / "report.json").read_text())
    assert (cells(found)["snapkv", 0.2]["kl"], cells(found)["snapkv", 0.2]["places"]) == (None, 0)


def test_a_request_that_is_refused_is_in_no_figure(asked, fake, tmp_path):
    fake.refuse = " 7"
    done = asked()
    assert (
        "The server refused 1 of 10 prompts (status 400); where it did, they are in no figure. With"
        " --keep-text its reason is said."
    ) in done.out
    assert "secret" not in done.out
    assert cells(report(tmp_path))["cake", 0.2]["asked"] == 9
    assert not report(tmp_path)["complete"]


def test_copies_of_a_prompt_are_asked_and_tell_no_more_than_one(asked, tmp_path):
    done = asked(numbers=[2] * 10)
    assert cells(report(tmp_path))["cake", 0.2]["asked"] == 10
    assert "No recommendation: 1 independent prompt can show no drop" in done.out


def test_a_run_does_not_go_on_with_other_answers_or_on_another_server(asked, fake, tmp_path):
    """Figures of both would stand side by side, and nothing would say so."""
    asked()
    journal = tmp_path / "out" / "journal.jsonl"
    before, least = journal.read_bytes(), fake.least
    fake.least += 1
    done = asked()
    assert (done.status, "another server settings" in done.err) == (2, True), done.err
    fake.least = least
    assert asked().status == 1
    mine = tmp_path / "mine.jsonl"
    write_prompts(mine, range(10))
    bodies = [json.loads(line) for line in mine.read_text().splitlines()]
    corrected = [{**body, "answer": "another"} for body in bodies]
    mine.write_text("".join(json.dumps(body) + "\n" for body in corrected))
    done = asked(numbers=None)
    assert (done.status, "another prompts" in done.err) == (2, True), done.err
    assert journal.read_bytes() == before


def test_a_table_fits_a_terminal_and_no_name_is_cut(asked, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    tables = [line for line in asked().out.splitlines() if line.startswith(" ")]
    assert max(map(len, tables)) <= 80
    # one more than those that are always there: of the roles
    assert sum(line.split()[:2] == ["snapkv", "0.2"] for line in tables) == len(TABLES) + 1


def test_a_model_of_any_name_is_told_and_drawn(asked, fake, tmp_path):
    fake.pages["/v1/models"] = 200, json.dumps({"data": [{"id": "[/b] $\\frac$"}]})
    assert "on [/b] $\\frac$: 10 prompts" in asked().out
    assert (tmp_path / "out" / "report.png").stat().st_size > 10_000


def test_a_log_says_how_far_it_is(asked):
    said = [line for line in asked().err.splitlines() if line.endswith("are asked.")]
    assert said == [f"{count} of 40 are asked." for count in range(4, 41, 4)]


def test_without_matplotlib_the_rest_is_there(asked, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    done = asked("--methods", "snapkv", "--budgets", "0.2")
    assert done.status == 1
    assert "no picture: it needs matplotlib; run pip install matplotlib" in done.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.json",
        "report.md",
        "journal.jsonl",
        "run.json",
    }


def test_built_in_tasks(compare, fake, tmp_path):
    done = compare(
        "--url",
        fake.url,
        "--tasks",
        "niah-single,key-values",
        "--length",
        400,
        "--count",
        2,
        *CELLS,
    )
    assert done.status == 1, done.err
    assert cells(report(tmp_path))["cake", 0.2]["asked"] == 4
    assert set(cells(report(tmp_path))["cake", 0.2]["tasks"]) == {"niah-single", "key-values"}
    assert "4 independent prompts can show" in done.out, "a text is asked one question"
    began = [b for b in fake.prompts if b["messages"][-1]["role"] == "assistant"]
    assert began
    assert all(b["continue_final_message"] and not b["add_generation_prompt"] for b in began)
    assert "Score by task" in (tmp_path / "out" / "report.md").read_text()


def test_an_earlier_turn_is_asked_before_its_chat_in_the_same_cache(compare, fake):
    compare(
        "--url",
        fake.url,
        "--tasks",
        "two-turns",
        "--length",
        "200",
        "--count",
        "2",
        "--methods",
        "cake",
        "--budgets",
        "0.5",
        "--no-baselines",
    )
    by_salt: dict[str, list] = {}
    for body in fake.prompts:
        by_salt.setdefault(body["cache_salt"], []).append(body)
    turns = [bodies for bodies in by_salt.values() if len(bodies) == 2]
    assert len(turns) == 2 * 2
    for first, second in turns:
        assert first["messages"] == second["messages"][:1]
        assert "continue_final_message" not in first
        assert second["continue_final_message"]
        assert first["vllm_xargs"] == second["vllm_xargs"]


def test_tools_are_sent_with_their_choice_taken_away(compare, fake, tmp_path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    line = {"messages": [{"role": "user", "content": "7"}], "tools": [tool], "tool_choice": "auto"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(line))
    compare("--url", fake.url, "--prompts", "mine.jsonl", *CELLS)
    assert {json.dumps(body["tools"]) for body in fake.prompts} == {json.dumps([tool])}
    assert {body["tool_choice"] for body in fake.prompts} == {"none"}
