"""The demo's log parsing, prompts, choice of the question and report. No server starts."""

import io
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from processor import AVX512
from vllm_kvcompress.demo import __main__ as demo
from vllm_kvcompress.demo.__main__ import parse_args
from vllm_kvcompress.demo.ask import Reply, Run, _per_token, summary
from vllm_kvcompress.demo.questions import (
    CHOSEN,
    QUESTIONS,
    TIMES,
    Asked,
    Question,
    noted_text,
    surest,
)
from vllm_kvcompress.demo.report import save_picture, show, show_request
from vllm_kvcompress.serving import process as server
from vllm_kvcompress.serving.process import Compressed, compressed_requests
from vllm_kvcompress.serving.text import QUESTION, english, long_prompt

CHOICE = Path(__file__).parents[2] / "benchmarks/results/demo_question.json"
LINE = (
    "(Worker pid=7) INFO 01-02 03:04:05 [reports.py:160] kv-compress: request='chatcmpl-a1'"
    " prompt_tokens=6036 kept_tokens=612.0 lookahead=0 blocks_before=189 blocks_after=20"
    " layer_tokens=[628,596]\n"
)


PEP = Question("Type hints are PEP 484.", "Which PEP?", "484")


def run(compressed: Compressed | None, blocks: float, answer: str = "PEP 484.") -> Run:
    return Run(
        answer=answer,
        token_ids=(7, *answer.encode()),
        first_token="PE",
        first_token_id=7,
        prompt_tokens=6036,
        first_token_s=12.5,
        token_s=0.08,
        blocks=blocks,
        requests=3,
        compressed=compressed,
    )


def report(on: Run, off: Run | None = None, console: Console | None = None) -> tuple[int, str]:
    out = io.StringIO()
    console = console or Console(file=out, width=100)
    off = off or run(None, 190.0)
    status = show(
        off, on, question=PEP, method="cake", budget="0.1", packed_dtype="auto", console=console
    )
    return status, out.getvalue()


@pytest.mark.parametrize("fast", [True, False])
def test_both_servers_use_float32_only_if_bfloat16_is_emulated(fast, monkeypatch):
    assert demo._multiplies_bfloat16() or not AVX512
    monkeypatch.setattr(demo, "_multiplies_bfloat16", lambda: fast)
    assert ("--dtype" in demo.common(parse_args([]))) is not fast


def test_servers_reserve_no_core_unless_the_operator_sets_a_number(monkeypatch):
    monkeypatch.delenv(demo.RESERVED_CORES, raising=False)
    assert demo._every_core() == {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    monkeypatch.setenv(demo.RESERVED_CORES, "1")
    assert demo._every_core() == {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}


def test_log_line_is_parsed():
    (one,) = compressed_requests(f"unrelated\n{LINE}unrelated\n")
    assert one == Compressed("chatcmpl-a1", 6036, 612.0, 0, 189, 20, (628, 596))


def test_compressed_requests_keep_the_order_of_the_log():
    log = LINE + LINE.replace("chatcmpl-a1", "chatcmpl-b2")
    assert [one.request for one in compressed_requests(log)] == ["chatcmpl-a1", "chatcmpl-b2"]


@pytest.mark.parametrize(
    "log",
    ["", "kv-compress: request=a prompt_tokens=5\n", LINE.replace("[628,596]", "[]")],
    ids=["empty", "cut short", "no layers"],
)
def test_incomplete_log_line_gives_no_request(log):
    assert compressed_requests(log) == []


@pytest.mark.parametrize("num_tokens", [1, 100, 6000])
def test_prompt_has_the_requested_length_and_ends_with_the_question(demo_model, num_tokens):
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prompt = long_prompt(tokenizer, num_tokens, "Why?")
    text, question = prompt.rsplit("\n\n", 1)
    assert question == "Why?"
    assert english().startswith(text)
    # Decoding and encoding again may merge tokens at the cut.
    assert len(tokenizer.encode(text, add_special_tokens=False)) == pytest.approx(num_tokens, abs=2)


def test_prompt_ends_with_the_default_question(demo_model):
    prompt = long_prompt(AutoTokenizer.from_pretrained(demo_model), 10)
    assert prompt.endswith(QUESTION)


@pytest.mark.parametrize("flags", [[], ["--long"]], ids=["short", "long"])
def test_text_has_every_note_in_each_third_between_paragraphs_of_english(demo_model, flags):
    tokenizer, tokens = AutoTokenizer.from_pretrained(demo_model), parse_args(flags).tokens
    text = noted_text(tokenizer, tokens)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == pytest.approx(tokens, rel=0.02)
    for question in QUESTIONS:
        depths = [found.start() / len(text) for found in re.finditer(question.note, text)]
        assert [int(depth * TIMES) for depth in depths] == list(range(TIMES))
        assert question.answered_by(question.note)
        text = text.replace(f"\n\n{question.note}", "")
    assert english().startswith(text)


def test_text_shorter_than_its_notes_is_an_error(demo_model):
    with pytest.raises(ValueError, match=r"must be longer than its notes, .* got 100"):
        noted_text(AutoTokenizer.from_pretrained(demo_model), 100)


def asked(gap: float, *, answer: str = "PEP 484", without_text: str = "PEP 8") -> Asked:
    return Asked(PEP, answer, without_text, gap)


def test_surest_answer_is_right_only_with_the_text():
    wrong = asked(0.9, answer="PEP 8")
    known_anyway = asked(0.8, without_text="pep 484")
    best = asked(0.3)
    assert surest([wrong, asked(0.2), best, known_anyway]) is best
    with pytest.raises(ValueError, match="question from the text, but it answered none; try other"):
        surest([wrong, known_anyway])


def test_the_recorded_answers_of_the_uncompressed_model_choose_the_question():
    entries = json.loads(CHOICE.read_text())["questions"]
    answers = [
        Asked(
            Question(e["note"], e["question"], e["fact"]), e["answer"], e["without_text"], e["gap"]
        )
        for e in entries
    ]
    assert tuple(one.question for one in answers) == QUESTIONS
    assert surest(answers).question == CHOSEN


def test_summary_has_the_first_answer_and_the_median_times(demo_model):
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    ids = tokenizer.encode("Typing, of course.")
    babble = tokenizer.encode("The text is about the text")
    replies = [
        Reply((*ids, tokenizer.eos_token_id, *babble), 6036, 12.0, 0.10, 5.0, None),
        Reply(tuple(babble), 6036, 30.0, 0.11, 6.0, None),
        Reply(tuple(babble), 6036, 11.0, 0.50, 4.0, None),
    ]
    made = summary(replies, tokenizer)
    assert made.answer == "Typing, of course."
    assert made.token_ids == tuple(ids)
    assert (made.first_token_id, made.first_token) == (ids[0], tokenizer.decode(ids[0]))
    assert (made.first_token_s, made.token_s, made.blocks, made.requests) == (12.0, 0.11, 6.0, 3)
    endless = summary(replies[1:], tokenizer)
    assert endless.answer == "The text is about the text"


def test_report_succeeds_if_vllm_got_blocks_back():
    status, text = report(run(compressed_requests(LINE)[0], 21.0))
    assert status == 0
    assert "vLLM got 169 of 190 KV blocks back" in text
    assert "12.50 s" in text
    assert "80 ms" in text
    assert "628" in text
    assert "596" in text


def test_report_fails_if_no_blocks_were_counted():
    status, text = report(run(compressed_requests(LINE)[0], 0.0))
    assert status == 1
    assert "The KV blocks were not counted" in text
    assert "vLLM got" not in text


@pytest.mark.parametrize(
    ("off", "on", "verdict"),
    [
        ("PEP 484.", "PEP 484.", "The same answer, word for word, and right: 484."),
        ("PEP 484.", "It is 484.", "The answers differ in wording, and both are right: 484."),
        ("PEP 8.", "It is 484.", "differ in wording, and only the compressed one is right: 484."),
        ("PEP 484.", "PEP 8.", "wrong: it lacks 484. The answer of vLLM alone has it."),
        ("PEP 8.", "PEP 8.", "wrong: it lacks 484. The answer of vLLM alone does not have it"),
    ],
)
def test_report_says_whether_the_compressed_answer_is_right(off, on, verdict):
    compressed = run(compressed_requests(LINE)[0], 21.0, answer=on)
    status, text = report(compressed, off=run(None, 190.0, answer=off))
    assert status == 0  # a wrong answer is reported, and does not fail the demo
    assert verdict in text


def test_report_compares_the_first_tokens():
    on = run(compressed_requests(LINE)[0], 21.0)
    assert "'PE', the same" in report(on)[1]
    status, text = report(replace(on, first_token_id=8))
    assert status == 1
    assert "'PE', a different one" in text
    assert "The first token differs, although the prompt was not compressed yet" in text


AHEAD = compressed_requests(LINE.replace("lookahead=0", "lookahead=2"))[0]


def test_report_compares_the_tokens_before_the_compression():
    alike = run(AHEAD, 21.0, answer="PE, as I said")
    status, text = report(alike)
    assert status == 0
    assert "Compression waits for the first 2 output tokens" in text
    status, text = report(replace(alike, token_ids=(7, *b"Pf")))
    assert status == 1
    assert (
        "The first 3 output tokens differ, although the prompt was not compressed yet: please"
        " report this." in " ".join(text.split())
    )


def request_report(on: Run) -> tuple[int, str]:
    out = io.StringIO()
    status = show_request(
        run(None, 190.0, "PE is a [paper]"), on, request="Why?", console=Console(file=out)
    )
    return status, out.getvalue()


def test_report_of_an_ordinary_request_counts_the_tokens_that_agree():
    status, text = request_report(run(AHEAD, 21.0, "PE is an enhancement"))
    assert status == 0
    assert "PE is a [paper]" in text
    assert "PE is an enhancement" in text
    assert (
        "The first 8 of 16 output tokens are the same; 3 of them were written before the"
        " compression. Then the wording differs." in " ".join(text.split())
    )
    assert (
        "The same output, all 16 tokens." in request_report(run(AHEAD, 21.0, "PE is a [paper]"))[1]
    )


def test_report_of_an_ordinary_request_fails_without_compression_or_with_early_differences():
    status, text = request_report(run(None, 21.0))
    assert status == 1
    assert "This prompt was not compressed" in text
    status, text = request_report(run(AHEAD, 21.0, "P"))
    assert status == 1
    assert "The first 3 output tokens differ" in text


def test_time_per_token_is_that_of_the_second_half():
    assert _per_token([0.0, 9.0, 9.5, 10.0], [1, 2, 3, 4]) == 0.5
    assert _per_token([0.0, 8.0, 10.0], [1, 5, 9]) == 0.5
    assert _per_token([3.0], [1]) == 0.0


def test_report_fails_without_a_compression_line():
    status, text = report(run(None, 190.0))
    assert status == 1
    assert "was not compressed" in text


def test_report_fails_if_vllm_got_no_blocks_back():
    status, text = report(run(compressed_requests(LINE)[0], 190.0))
    assert status == 1
    assert "vLLM got no KV blocks back" in text


def test_square_brackets_in_an_answer_are_not_console_markup():
    on = run(compressed_requests(LINE)[0], 21.0, answer="It prints [0, 2] and [bold]484[/].")
    assert "[bold]484[/]" in report(on)[1]


def test_picture_has_the_report_and_no_links_to_other_files(tmp_path):
    console = Console(file=io.StringIO(), width=100, record=True)
    report(run(compressed_requests(LINE)[0], 21.0), console=console)
    save_picture(console, tmp_path / "report.svg", "make demo")
    svg = (tmp_path / "report.svg").read_text()
    assert "blocks" in svg
    assert set(re.findall(r"https?://[^\"' ]+", svg)) == {"http://www.w3.org/2000/svg"}


def test_the_short_form_is_the_default_and_flags_win_over_both_forms():
    def form(*flags: str) -> tuple[int, int]:
        args = parse_args(list(flags))
        assert args.tokens + args.max_tokens < 8192  # --max-model-len
        return args.tokens, args.rounds

    assert form() == (3000, 1)
    assert form("--long") == (6000, 3)
    assert form("--long", "--rounds", "2") == (6000, 2)
    assert form("--tokens", "2000") == (2000, 1)


# A background job ignores SIGINT, and its children inherit that. The script restores the default.
SCRIPT = (
    "import signal, subprocess, sys, time; signal.signal(2, signal.default_int_handler);"
    " print({text!r}); subprocess.Popen({child}); time.sleep(60)"
)


@pytest.fixture
def stub(monkeypatch):
    """Replace the server's command by a script that prints `text`.

    With `hang`, the script also starts a child that ignores SIGINT, and does not end by itself.
    """

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
        except OSError:  # the process ended meanwhile
            continue
        if fields[2] == pid and fields[0] != "Z":
            return True
    return False


def test_error_of_a_server_that_ends_at_once_has_the_end_of_its_log(stub, tmp_path):
    stub("no such model", hang=False)
    with (
        pytest.raises(RuntimeError, match=r"the server ended.*\n.*no such model"),
        server.serve("m", [], tmp_path / "log", deadline_s=300),
    ):
        pass


def test_unhealthy_server_is_killed_with_its_children(stub, tmp_path, monkeypatch):
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
