"""The demo's own logic: the log line, the prompt, the report's exit status. No server starts."""

import io
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from vllm_kvcompress.demo import server
from vllm_kvcompress.demo.__main__ import parse_args
from vllm_kvcompress.demo.report import save_picture, show
from vllm_kvcompress.demo.server import Compressed, compressed_requests
from vllm_kvcompress.demo.text import QUESTION, english, long_prompt

LINE = (
    "(Worker pid=7) INFO 01-02 03:04:05 [compressor.py:244] kv-compress: request=chatcmpl-a1"
    " prompt_tokens=6036 kept_tokens=612.0 blocks_before=189 blocks_after=20"
    " layer_tokens=[628,596]\n"
)


def run(compressed: Compressed | None, blocks: float) -> SimpleNamespace:
    return SimpleNamespace(
        answer="An answer.",
        first_token="An",
        prompt_tokens=6036,
        tokens_per_second=10.0,
        blocks=blocks,
        compressed=compressed,
    )


def report(on: SimpleNamespace) -> tuple[int, str]:
    out = io.StringIO()
    console = Console(file=out, width=100)
    status = show(run(None, 190.0), on, method="cake", budget="0.1", console=console)
    return status, out.getvalue()


def test_log_line_is_read():
    (one,) = compressed_requests(f"unrelated\n{LINE}unrelated\n")
    assert one == Compressed("chatcmpl-a1", 6036, 612.0, 189, 20, (628, 596))


def test_every_compressed_request_is_read_in_order():
    log = LINE + LINE.replace("chatcmpl-a1", "chatcmpl-b2")
    assert [one.request for one in compressed_requests(log)] == ["chatcmpl-a1", "chatcmpl-b2"]


@pytest.mark.parametrize(
    "log",
    ["", "kv-compress: request=a prompt_tokens=5\n", LINE.replace("[628,596]", "[]")],
    ids=["empty", "cut short", "no layers"],
)
def test_log_without_a_whole_line_holds_no_request(log):
    assert compressed_requests(log) == []


@pytest.mark.parametrize("num_tokens", [1, 100, 6000])
def test_prompt_has_the_tokens_asked_for_and_ends_in_the_question(demo_model, num_tokens):
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prompt = long_prompt(tokenizer, num_tokens, "Why?")
    text, question = prompt.rsplit("\n\n", 1)
    assert question == "Why?"
    assert english().startswith(text)
    # decoding and encoding again may merge tokens at the cut
    assert len(tokenizer.encode(text, add_special_tokens=False)) == pytest.approx(num_tokens, abs=2)


def test_prompt_asks_a_question_by_default(demo_model):
    prompt = long_prompt(AutoTokenizer.from_pretrained(demo_model), 10)
    assert prompt.endswith(QUESTION)


def test_report_succeeds_when_blocks_went_back():
    status, text = report(run(compressed_requests(LINE)[0], 21.0))
    assert status == 0
    assert "169 of 190 blocks" in text


def test_report_fails_without_a_compression_line():
    status, text = report(run(None, 190.0))
    assert status == 1
    assert "was not compressed" in text


def test_report_fails_when_no_block_went_back():
    status, text = report(run(compressed_requests(LINE)[0], 190.0))
    assert status == 1
    assert "did not fall" in text


def test_picture_shows_the_report_and_loads_nothing_from_elsewhere(tmp_path):
    console = Console(file=io.StringIO(), width=100, record=True)
    on = run(compressed_requests(LINE)[0], 21.0)
    show(run(None, 190.0), on, method="cake", budget="0.1", console=console)
    save_picture(console, tmp_path / "report.svg", "make demo")
    svg = (tmp_path / "report.svg").read_text()
    assert "blocks" in svg
    assert set(re.findall(r"https?://[^\"' ]+", svg)) == {"http://www.w3.org/2000/svg"}


def test_defaults_fit_the_model():
    args = parse_args([])
    assert args.tokens + args.max_tokens < 8192


# A job in the background starts with SIGINT ignored, and hands that on: the server's own would not.
SCRIPT = (
    "import signal, subprocess, sys, time; signal.signal(2, signal.default_int_handler);"
    " print({text!r}); subprocess.Popen({child}); time.sleep(60)"
)


@pytest.fixture
def stub(monkeypatch):
    """In the server's place: prints, starts a child that ignores SIGINT, and hangs."""

    def place(text: str, *, hang: bool) -> None:
        child = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)"
        line = (
            SCRIPT.format(text=text, child=[sys.executable, "-c", child])
            if hang
            else f"print({text!r})"
        )
        monkeypatch.setattr(server, "command", lambda *_: [sys.executable, "-c", line])

    return place


def group_lives(log: Path) -> bool:
    pid = log.with_suffix(".pid").read_text()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it ended meanwhile
            continue
        if fields[2] == pid and fields[0] != "Z":
            return True
    return False


def test_server_that_ends_at_once_shows_the_end_of_its_log(stub, tmp_path):
    stub("no such model", hang=False)
    with (
        pytest.raises(RuntimeError, match=r"the server ended.*\n.*no such model"),
        server.serve("m", [], tmp_path / "log", deadline_s=300),
    ):
        pass


def test_server_that_is_never_healthy_is_killed_with_its_children(stub, tmp_path, monkeypatch):
    stub("starting", hang=True)
    log, popen = tmp_path / "log", server.subprocess.Popen

    def remember(*args, **kwargs):
        process = popen(*args, **kwargs)
        log.with_suffix(".pid").write_text(str(process.pid))
        return process

    monkeypatch.setattr(server.subprocess, "Popen", remember)
    with (
        pytest.raises(RuntimeError, match="was not healthy within 2 s"),
        server.serve("m", [], log, deadline_s=2),
    ):
        pass
    end = time.monotonic() + 300
    while group_lives(log) and time.monotonic() < end:
        time.sleep(0.1)
    assert not group_lives(log)
