"""What ``kvcompress compare`` says where it cannot go on: a sentence, and what was done is kept."""

import contextlib
import json
import sys

import pytest

from fake_vllm import write_prompts
from vllm_kvcompress.serving import process as server

CELLS = ["--methods", "cake,snapkv", "--budgets", "0.5,0.2"]


@pytest.fixture
def asked(compare, fake, tmp_path):
    """Compare ten prompts, one at a time; further flags may follow."""

    def asking(*more):
        write_prompts(tmp_path / "mine.jsonl", range(10))
        return compare(
            "--url", fake.url, "--prompts", "mine.jsonl", "--concurrency", 1, *CELLS, *more
        )

    return asking


def one_sentence(done):
    lines = done.err.strip().splitlines()
    assert lines[-1].startswith("kvcompress: error: "), done.err
    assert "Traceback" not in done.err
    return lines[-1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--methods", "snapkw"], "did you mean"),
        (["--methods", ","], "--methods must name at least one"),
        (["--budgets", "2.5"], "budget must be a ratio in (0, 1]"),
        (["--budgets", "0.5,256"], "must be all ratios or all whole numbers"),
        (["--max-drop", "0"], "--max-drop must be in (0, 1)"),
        (["--by", "feeling"], "--by must be one of score, agreement, similarity"),
        (["--tasks", "niah-single"], "give one of --prompts and --tasks"),
        (["--model", "."], "give one of --url and --model"),
        (["--", "--enforce-eager"], "flags of vllm serve are for a server of --model"),
        (["--prompts", "none"], "--prompts none cannot be read"),
    ],
)
def test_what_was_typed_means_nothing(asked, fake, flags, said):
    done = asked(*flags)
    assert done.status == 2
    assert said in one_sentence(done)
    assert not fake.asked


def test_a_malformed_line_is_found_before_anything_is_asked(compare, fake, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    done = compare("--url", fake.url, "--prompts", "mine.jsonl", *CELLS)
    assert (done.status, len(fake.asked)) == (2, 0)
    assert "mine.jsonl, line 2: prompt must be a text" in one_sentence(done)


def test_unknown_tasks_and_folders(compare, fake, tmp_path):
    done = compare("--url", fake.url, "--tasks", "niah-singel", *CELLS)
    assert "task='niah-singel' is unknown" in one_sentence(done)
    done = compare("--model", tmp_path, "--tasks", "niah-single", *CELLS)
    assert "must be a model's folder, with a config.json in it" in one_sentence(done)
    assert done.status == 2


def test_a_dead_server(compare, tmp_path):
    write_prompts(tmp_path / "mine.jsonl", range(3))
    done = compare("--url", "http://127.0.0.1:9", "--prompts", "mine.jsonl", *CELLS)
    assert done.status == 2
    assert "does not answer" in one_sentence(done)


@pytest.mark.parametrize(
    ("page", "answer", "flags", "said"),
    [
        ("/health", (404, ""), [], "/health answered 404; give the address of vLLM itself"),
        ("/health", (503, ""), [], "/health answered 503; wait until the server is well"),
        ("/v1/models", (401, '{"error": "Unauthorized"}'), [],
         'answered 401: {"error": "Unauthorized"}; pass --api-key'),
        ("/v1/models", (401, ""), ["--api-key", "guess"], "--api-key is not the server's"),
        ("/v1/models", (200, "<html>"), [], "lists no model; is it a vLLM server?"),
        ("/v1/chat/completions",
         (400, '{"error": {"message": "you must provide a chat template."}}'), [],
         "you must provide a chat template. Every prompt is sent as a chat: start it with"
         " --chat-template"),
        ("/v1/chat/completions", (404, "no such page"), [], "answered 404: no such page"),
    ],
)  # fmt: skip
def test_a_server_that_is_not_what_it_should_be(asked, fake, page, answer, flags, said):
    fake.pages[page] = answer
    done = asked(*flags)
    assert done.status == 2
    assert said in one_sentence(done)
    assert "guess" not in done.err


def test_a_server_whose_key_has_an_end_of_line(asked, fake):
    done = asked("--api-key", "guess\n")
    assert (done.status, fake.asked) == (2, [])
    assert "--api-key must be ASCII without spaces" in one_sentence(done)
    assert "guess" not in done.err


def test_a_server_without_the_plugin(asked, fake):
    fake.plugin = False
    done = asked()
    assert done.status == 2
    assert "start it with --kv-compress off --kv-allow-override all" in one_sentence(done)
    assert not fake.prompts


def test_a_server_that_refuses_a_method(asked, fake):
    fake.allowed = ["off", "cake"]
    done = asked()
    assert done.status == 2
    said = one_sentence(done)
    assert "the server refuses snapkv 0.5: kv_compress must be one of ['off', 'cake']" in said
    assert "--kv-allow-override all" in said
    assert not fake.prompts


def test_a_server_that_lets_no_request_choose(asked, fake):
    reason = "this server does not let requests choose kv_compress or kv_budget"
    fake.pages["/v1/chat/completions"] = 400, json.dumps({"error": {"message": reason}})
    said = one_sentence(asked())
    assert f"the server refuses off: {reason}; start it with --kv-allow-override all" in said


def test_a_server_that_must_compress(asked, fake):
    fake.allowed = ["cake", "snapkv"]
    assert "the server refuses off" in one_sentence(asked())


def test_a_server_without_metrics_is_asked_for_a_method_that_is_none(asked, fake):
    fake.metrics = False
    assert asked().status == 1
    assert len(fake.prompts) == 50


def test_a_score_without_answers(asked, tmp_path, compare, fake):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a 1"}\n')
    done = compare("--url", fake.url, "--prompts", "mine.jsonl", "--by", "score", *CELLS)
    assert "--by score needs prompts with an answer" in one_sentence(done)
    done = compare("--url", fake.url, "--prompts", "mine.jsonl", *CELLS)
    assert json.loads((tmp_path / "out/report.json").read_text())["recommendation"]["by"] == (
        "similarity"
    )


def test_a_server_that_is_lost_on_the_way_and_comes_back(asked, fake, tmp_path):
    fake.fail_from = 23
    done = asked()
    assert done.status == 2
    said = one_sentence(done)
    assert "out of luck" in said
    # four prompts of five requests, and two cells of the fifth
    assert "18 of 40 are done and kept in out; the same command goes on from there." in said
    assert len((tmp_path / "out/journal.jsonl").read_text().splitlines()) == 18
    assert "This is not all: 18 of 40 are done." in (tmp_path / "out/report.md").read_text()
    before = len(fake.prompts)
    fake.fail_from = None
    done = asked("--json")
    assert "18 of 40 are there already." in done.err
    found = json.loads(done.out)
    assert found["complete"]
    assert {cell["asked"] for cell in found["cells"]} == {10}
    # the full cache once more for the prompt that was begun, and what was open
    assert len(fake.prompts) - before == 6 + 22
    again = len(fake.prompts)
    assert json.loads(asked("--json").out)["cells"] == found["cells"]
    assert len(fake.prompts) == again


def test_an_answer_that_breaks_off_is_no_answer(asked, fake, tmp_path, monkeypatch):
    """The server dies: its last answer ends early, and its connection as any other."""
    stream = fake._stream

    def cut(*request):
        text = stream(*request)
        return text if len(fake.prompts) <= 23 else text[: text.rindex("data: ")]

    monkeypatch.setattr(fake, "_stream", cut)
    said = one_sentence(asked())
    assert "broke off its answer" in said
    assert ". 18 of 40 are done and kept in out; the same command goes on from there." in said
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    done = asked("--json")
    assert "18 of 40 are there already." in done.err
    assert json.loads(done.out)["complete"]


@pytest.mark.parametrize("keep_text", [True, False])
def test_prompts_that_the_server_refuses(asked, fake, tmp_path, keep_text):
    """Every one, for its length; a reason may have what looks like a terminal's markup."""
    fake.refuse, fake.reason = "secret", "[/INST] this model's maximum context length is 8 \ud83d"
    done = asked(*["--keep-text"] * keep_text)
    assert done.status == 1
    assert "The server refused 10 of 10 prompts (status 400, too long for its context)" in done.out
    assert "No recommendation: no prompt was answered." in done.out
    assert ("[/INST] this model's maximum context length is 8 ?: secret" in done.out) == keep_text
    assert ("secret" in (tmp_path / "out/report.md").read_text()) == keep_text
    assert "Traceback" not in done.err


def test_a_hiccup_is_no_loss(asked, fake, monkeypatch):
    chat, hiccups = fake._chat, iter([False] * 30 + [True] * 3 + [False] * 1000)
    monkeypatch.setattr(fake, "_chat", lambda b: (503, "") if next(hiccups) else chat(b))
    assert asked().status == 1


def test_an_answer_that_is_no_stream(asked, fake, monkeypatch):
    monkeypatch.setattr(fake, "_stream", lambda *_: "data: no\n")
    done = asked()
    assert done.status == 2
    assert "is it a vLLM server?" in one_sentence(done)


def test_a_server_of_our_own_that_is_lost(compare, fake, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "vllm_kvcompress.compare.server.start", lambda *_: contextlib.nullcontext(fake.url)
    )
    fake.fail_from = 3
    (tmp_path / "config.json").write_text("{}")
    done = compare("--model", ".", "--tasks", "niah-single", "--length", 400, "--count", 3, *CELLS)
    assert done.status == 2
    assert one_sentence(done).endswith(" from there. The server's log is out/server.log.")


def test_a_server_of_our_own_that_does_not_start(compare, tmp_path, monkeypatch):
    flags = []

    def command(model, port, arguments):
        flags.extend(arguments)
        return [sys.executable, "-c", "print('no such model')"]

    monkeypatch.setattr(server, "command", command)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    done = compare("--model", "model", "--tasks", "niah-single", *CELLS, "--", "--enforce-eager")
    assert done.status == 2
    assert "the server ended before it was healthy; see out/server.log" in one_sentence(done)
    assert "no such model" in (tmp_path / "out/server.log").read_text()
    assert flags[flags.index("--kv-allow-override") + 1] == "off,cake,snapkv,streamingllm,random"
    assert flags[flags.index("--kv-budget-bounds") + 1] == "0.2:0.5"
    assert flags[-2:] == ["--kv-usage", "--enforce-eager"]
