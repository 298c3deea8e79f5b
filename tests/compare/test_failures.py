"""Failures of ``kvcompress compare``: one error sentence, and finished results are kept."""

import contextlib
import json
import sys

import pytest

from fake_vllm import FakeVllm, read_report
from loopback import recording, redirecting
from loopback import server as http_server
from vllm_kvcompress.serving import process as server


def error_sentence(result):
    """Return the last line of stderr, after checking that it is an error without a traceback."""
    lines = result.err.strip().splitlines()
    assert lines[-1].startswith("kvcompress: error: "), result.err
    assert "Traceback" not in result.err
    return lines[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--methods snapkw", "did you mean"),
        ("--methods ,", "--methods must have at least one value"),
        ("--budgets 2.5", "budget must be a ratio in (0, 1]"),
        ("--budgets 0.5,256", "must be all ratios or all whole numbers"),
        ("--budgets 0.2:k4v4", "did you mean 'k4v3'?"),
        ("--budgets k4v3", "budget must be"),
        ("--max-drop 0", "--max-drop must be in (0, 1)"),
        ("--by feeling", "--by must be one of score, agreement, similarity"),
        ("--question middle", "--question must be one of last, first"),
        ("--tasks niah-single", "give either --prompts or --tasks"),
        ("--model .", "give either --url (a running server) or --model"),
        ("-- --enforce-eager", "flags of vllm serve need --model"),
        ("--prompts none", "--prompts none cannot be read"),
        *((f"--lookaheads {typed}", "--lookaheads must") for typed in ("-1", "1.5", "0,many", ",")),
        ("--lookaheads \u00b3", "--lookaheads must be whole numbers of output tokens, 0 or more"),
        ("--against fp8", "--against fp8 starts a server and needs --model; start one yourself"),
        ("--against fp8:8000/v1", "--against must be a server's address without a path"),
        ("--against {url}/", "--against must name other servers than --url, each once"),
        ("--against http://a --against http://a/", "must name other servers than --url, each once"),
    ],
)
def test_invalid_arguments_are_refused_before_any_request(run_compare, fake, flags, message):
    result = run_compare(flags.format(url=fake.url))
    assert result.status == 2
    assert message in error_sentence(result)
    assert not fake.requests


def test_an_invalid_prompt_is_refused_before_any_request(run_compare, fake, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    result = run_compare(numbers=None)
    assert (result.status, len(fake.requests)) == (2, 0)
    assert "mine.jsonl, line 2: prompt must be a non-empty string" in error_sentence(result)


def test_unknown_tasks_and_model_folders_are_refused(compare, fake, tmp_path):
    result = compare(f"--url {fake.url} --tasks niah-singel")
    assert "task='niah-singel' is unknown" in error_sentence(result)
    result = compare(f"--model {tmp_path} --tasks niah-single")
    assert "--model must be a model folder that contains a config.json" in error_sentence(result)
    assert result.status == 2


def test_an_unreachable_server_is_an_error(run_compare):
    result = run_compare("--url http://127.0.0.1:9")
    assert result.status == 2
    assert "does not answer" in error_sentence(result)


CHAT = "/v1/chat/completions"
NO_TEMPLATE = "you must provide a chat template."
NO_OVERRIDES = "this server does not let requests choose kv_compress or kv_budget"


def refusal(reason):
    return 400, json.dumps({"error": {"message": reason}})


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"/health": (404, "")}, "", "/health returned 404; give the address of vLLM itself"),
        ({"/health": (503, "")}, "", "/health returned 503; wait until the server is healthy"),
        ({"/v1/models": (401, '{"error": "Unauthorized"}')}, "",
         'answered 401: {"error": "Unauthorized"}; pass --api-key'),
        ({"/v1/models": (401, "")}, "--api-key guess", "--api-key is not the server's key"),
        ({"/v1/models": (200, "<html>")}, "", "lists no model; is it a vLLM server?"),
        ({CHAT: refusal(NO_TEMPLATE)}, "",
         f"{NO_TEMPLATE} Every prompt is sent as a chat: start the server with --chat-template"),
        ({CHAT: refusal(NO_OVERRIDES)}, "", f"the server refuses off: {NO_OVERRIDES}; start the"
         " server with --kv-allow-override all"),
        ({CHAT: (404, "no such page")}, "", "answered 404: no such page"),
        ({CHAT: (200, "data: no\n")}, "", "is it a vLLM server?"),
        ({"has_plugin": False}, "",
         "start the server with --kv-compress off --kv-allow-override all"),
        ({"allowed_methods": ["off", "cake"]}, "", "the server refuses snapkv 0.5: kv_compress must"
         " be one of ['off', 'cake'] on this server, got 'snapkv'; start the server with"
         " --kv-allow-override all"),
        ({"allowed_methods": ["cake", "snapkv"]}, "", "the server refuses off"),
    ],
)  # fmt: skip
def test_an_unusable_server_is_an_error_with_a_fix(run_compare, fake, changes, flags, message):
    for name, value in changes.items():
        if name.startswith("/"):
            fake.responses[name] = value
        else:
            setattr(fake, name, value)
    result = run_compare(flags)
    assert result.status == 2
    assert message in error_sentence(result)
    assert "guess" not in result.err
    assert not fake.prompt_requests


def test_a_redirect_is_an_error_and_its_target_gets_no_request(run_compare, fake):
    """Neither the first server nor another one may send the prompts and the key elsewhere."""
    requests = []
    target = recording(requests, FakeVllm())
    with http_server(target) as final, http_server(redirecting(final)) as url:
        for flag in ("--url", "--against"):
            result = run_compare(f"{flag} {url} --api-key guess")
            assert result.status == 2
            assert f"it redirects to '{final}/" in error_sentence(result)
            assert f"set {flag} to the final address" in error_sentence(result)
    assert (requests, fake.prompt_requests) == ([], [])


def test_control_characters_of_the_server_are_not_printed(run_compare, fake, tmp_path):
    fake.cache_dtype, fake.refused_text, fake.refusal_reason = "\x1b[2J", "secret 3", "\x1b[2J\x9b"
    result = run_compare(f"--keep-text --against {fake.url.replace('127.0.0.1', 'localhost')}")
    assert "?[2J alone" in result.out
    assert "The reason for one of them: ?[2J?: secret" in result.out
    written = "".join(p.read_text() for p in (tmp_path / "out").iterdir() if p.suffix != ".png")
    for text in (result.out, result.err, written):
        assert all(line.isprintable() for line in text.split("\n"))
    fake.responses["/v1/models"] = 200, json.dumps({"data": [{"id": "\x1b[2J"}]})
    result = run_compare("--out other")
    assert result.status == 2
    assert "got '?[2J'; start the server with another --served-model-name" in error_sentence(result)


def test_an_output_is_kept_without_control_characters(run_compare, fake, tmp_path, monkeypatch):
    """A terminal that prints the file obeys U+009B, which JSON may hold as it is."""
    stream = fake._stream
    monkeypatch.setattr(
        fake,
        "_stream",
        lambda *request: stream(*request).replace('"content": "4"', r'"content": "\u009b\u202e"'),
    )
    run_compare("--keep-text")
    lines = (tmp_path / "out/texts.jsonl").read_text().split("\n")
    assert all(line.isprintable() for line in lines)
    assert "\x9b\u202e" * 8 in {json.loads(line)["text"] for line in lines if line}


def test_an_api_key_with_a_line_break_is_refused(run_compare, fake):
    result = run_compare("--api-key", "guess\n")
    assert (result.status, fake.requests) == (2, [])
    assert "--api-key must be ASCII without spaces" in error_sentence(result)
    assert "guess" not in result.err


def test_without_metrics_an_unknown_method_detects_the_plugin(run_compare, fake):
    fake.has_metrics = False
    assert run_compare().status == 1
    assert len(fake.prompt_requests) == 50


def test_without_answers_the_loss_is_by_similarity(run_compare, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a 1"}\n')
    run_compare(numbers=None)
    assert read_report(tmp_path)["recommendation"]["by"] == "similarity"


def test_a_run_resumes_after_the_server_was_lost(run_compare, fake, tmp_path):
    fake.fail_from = 23
    result = run_compare()
    assert result.status == 2
    message = error_sentence(result)
    assert "out of luck" in message
    # Four prompts of five requests each, and two cells of the fifth prompt.
    assert "18 of 40 results are saved in out; run the same command to resume." in message
    assert len((tmp_path / "out/journal.jsonl").read_text().splitlines()) == 18
    markdown = (tmp_path / "out/report.md").read_text()
    assert "This run is incomplete: 18 of 40 results are in the figures." in markdown
    before = len(fake.prompt_requests)
    fake.fail_from = None
    result = run_compare("--json")
    assert "Resuming: 18 of 40 results were saved earlier." in result.err
    report = json.loads(result.out)
    assert report["complete"]
    assert {cell["asked"] for cell in report["cells"]} == {10}
    # The full cache runs again for the unfinished prompt.
    assert len(fake.prompt_requests) - before == 6 + 22
    num_requests = len(fake.prompt_requests)
    assert json.loads(run_compare("--json").out)["cells"] == report["cells"]
    assert len(fake.prompt_requests) == num_requests


def test_an_incomplete_stream_is_not_a_result(run_compare, fake, tmp_path, monkeypatch):
    """The server dies: its last stream ends early, and the connection closes normally."""
    stream = fake._stream

    def cut(*request):
        text = stream(*request)
        return text if len(fake.prompt_requests) <= 23 else text[: text.rindex("data: ")]

    monkeypatch.setattr(fake, "_stream", cut)
    message = error_sentence(run_compare())
    assert "closed the connection before its response was complete" in message
    assert ". 18 of 40 results are saved in out; run the same command to resume." in message
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    result = run_compare("--json")
    assert "Resuming: 18 of 40 results were saved earlier." in result.err
    assert json.loads(result.out)["complete"]


@pytest.mark.parametrize("keep_text", [True, False])
def test_the_reason_of_a_refusal_is_shown_with_keep_text_only(
    run_compare, fake, tmp_path, keep_text
):
    """The server refuses every prompt for its length. The reason looks like terminal markup."""
    fake.refused_text = "secret"
    fake.refusal_reason = "[/INST] this model's maximum context length is 8 \ud83d"
    result = run_compare("--keep-text" * keep_text)
    assert result.status == 1
    assert (
        "The server refused 10 of 10 prompts (status 400, too long for its context)" in result.out
    )
    assert "No recommendation: the server completed no prompt." in result.out
    assert ("[/INST] this model's maximum context length is 8 ?: secret" in result.out) == keep_text
    assert ("secret" in (tmp_path / "out/report.md").read_text()) == keep_text
    assert "Traceback" not in result.err


def test_transient_failures_are_retried(run_compare, fake, monkeypatch):
    chat, failures = fake._chat, iter([False] * 30 + [True] * 3 + [False] * 1000)
    monkeypatch.setattr(fake, "_chat", lambda b: (503, "") if next(failures) else chat(b))
    assert run_compare().status == 1


def test_losing_the_started_server_names_its_log(compare, fake, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "vllm_kvcompress.compare.server.start", lambda *_: contextlib.nullcontext(fake.url)
    )
    fake.fail_from = 3
    (tmp_path / "config.json").write_text("{}")
    flags = "--methods cake --budgets 0.5"
    result = compare(f"--model . --tasks niah-single --length 400 --count 3 {flags}")
    assert result.status == 2
    assert error_sentence(result).endswith(" to resume. The server's log is out/server.log.")


def test_a_server_that_does_not_start_is_an_error_with_its_log(compare, tmp_path, monkeypatch):
    flags = []

    def command(model, port, arguments):
        flags.extend(arguments)
        return [sys.executable, "-c", "print('no such model')"]

    monkeypatch.setattr(server, "command", command)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    flags_of_compare = "--model model --tasks niah-single --methods cake,snapkv --budgets 0.5,0.2"
    result = compare(f"{flags_of_compare} -- --enforce-eager")
    assert result.status == 2
    assert "the server ended before it was healthy; see out/server.log" in error_sentence(result)
    assert "no such model" in (tmp_path / "out/server.log").read_text()
    assert flags[flags.index("--kv-allow-override") + 1] == "off,cake,snapkv,streamingllm,random"
    assert flags[flags.index("--kv-budget-bounds") + 1] == "0.2:0.5"
    assert flags[-2:] == ["--kv-usage", "--enforce-eager"]
