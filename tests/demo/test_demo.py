"""The demo's log parsing, prompts, choice of the question and report. No server starts."""

import io
import json
import re
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from processor import AVX512
from vllm_kvcompress.demo import __main__ as demo
from vllm_kvcompress.demo import chats
from vllm_kvcompress.demo.__main__ import parse_args
from vllm_kvcompress.demo.ask import Measured, Reply
from vllm_kvcompress.demo.figures import Agreement, Comparison, agreement, compare, failures, losses
from vllm_kvcompress.demo.questions import (
    CHOSEN,
    NOTES,
    REQUEST,
    TIMES,
    UNCOMPRESSED,
    Note,
    Question,
    noted_text,
    prompt,
    sections,
)
from vllm_kvcompress.demo.report import (
    save_picture,
    show_load,
    show_losses,
    show_outputs,
    show_question,
)
from vllm_kvcompress.methods.registry import RECOMMENDED
from vllm_kvcompress.serving import process as server
from vllm_kvcompress.serving.process import Compressed, compressed_requests
from vllm_kvcompress.serving.text import english
from vllm_kvcompress.settings.config import CompressionConfig

CHOICE = Path(__file__).parents[2] / "benchmarks/results/demo_question.json"
LINE = (
    "(Worker pid=7) INFO 01-02 03:04:05 [reports.py:160] kv-compress: request='chatcmpl-a1'"
    " prompt_tokens=6036 kept_tokens=612.0 lookahead=0 blocks_before=189 blocks_after=20"
    " layer_tokens=[628,596]\n"
)


NOTE = Note("Type hints are PEP 484.", "Which PEP?", "484")
PEP = Question((Note("The cat is called Tom.", "What is the cat called?", "Tom"), NOTE))
END = 2
"""The end of a turn in these token ids; the other tokens are characters."""


def decode(ids) -> str:
    return "".join(map(chr, ids))


def reply(text: str, **changes) -> Reply:
    made = Reply(text, tuple(map(ord, text)), 1500, 0, 12.5, 20.0, None)
    return replace(made, **changes)


def ahead(lookahead=2) -> Compressed:
    """Return the log line of a prompt whose compression waited for two output tokens."""
    return replace(compressed_requests(LINE)[0], lookahead=lookahead)


def measured(*replies: Reply, blocks: float, **changes) -> Measured:
    times = {"wall_s": 60.0, "first_token_s": 12.5, "prefill_s": 12.0, "compression_s": 0.5}
    load = {"tokens_per_s": 0.2, "mean_running": 2.0, "max_running": 3.0, "preemptions": 0}
    held = {"max_blocks": blocks + 9, "blocks_per_request": blocks / 2, "last_blocks": blocks}
    made = Measured(replies=replies, **times, **load, **held)
    return replace(made, **changes)


def comparison(off: str | Measured, on: str | Measured) -> Comparison:
    """Return both servers' replies, or the comparison of one reply each."""
    if isinstance(off, str):
        off = measured(reply(off), blocks=14)
    if isinstance(on, str):
        on = measured(reply(on, compressed=ahead()), blocks=5)
    return compare(off, on, END)


def printed(write, *arguments, **named) -> str:
    out = io.StringIO()
    write(*arguments, **named, console=Console(file=out, width=100))
    return out.getvalue()


@pytest.mark.parametrize("fast", [True, False])
def test_both_servers_use_float32_only_if_bfloat16_is_emulated(fast, monkeypatch):
    assert demo._multiplies_bfloat16() or not AVX512
    monkeypatch.setattr(demo, "_multiplies_bfloat16", lambda: fast)
    assert ("--dtype" in demo.common()) is not fast


def test_servers_reserve_no_core_unless_the_operator_sets_a_number(monkeypatch):
    monkeypatch.delenv(demo.RESERVED_CORES, raising=False)
    assert demo._every_core() == {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    monkeypatch.setenv(demo.RESERVED_CORES, "1")
    assert demo._every_core() == {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}


def test_compressed_requests_are_read_in_the_order_of_the_log():
    log = f"unrelated\n{LINE}unrelated\n" + LINE.replace("chatcmpl-a1", "chatcmpl-b2")
    one, other = compressed_requests(log)
    assert one == Compressed("chatcmpl-a1", 6036, 612.0, 0, 189, 20, (628, 596))
    assert other == replace(one, request="chatcmpl-b2")


@pytest.mark.parametrize(
    "log",
    ["", "kv-compress: request=a prompt_tokens=5\n", LINE.replace("[628,596]", "[]")],
    ids=["empty", "cut short", "no layers"],
)
def test_incomplete_log_line_gives_no_request(log):
    assert compressed_requests(log) == []


@pytest.mark.parametrize("tokens", [demo.QUESTION_TEXT, 6000])
def test_text_has_every_note_in_each_third_between_paragraphs_of_english(demo_model, tokens):
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = noted_text(tokenizer, tokens)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == pytest.approx(tokens, rel=0.02)
    for note in NOTES:
        depths = [found.start() / len(text) for found in re.finditer(note, text)]
        assert [int(depth * TIMES) for depth in depths] == list(range(TIMES))
        text = text.replace(f"\n\n{note}", "")
    assert english().startswith(text)


def test_sections_are_the_first_paragraphs_of_english(demo_model):
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    found = sections(tokenizer, 1500, 9)
    assert english().startswith("\n\n".join(found) + "\n\n")
    for text in found:
        assert 1300 < len(tokenizer.encode(text, add_special_tokens=False)) <= 1502


def test_text_shorter_than_its_notes_is_an_error(demo_model):
    with pytest.raises(ValueError, match=r"must be longer than its notes, .* got 100"):
        noted_text(AutoTokenizer.from_pretrained(demo_model), 100)


def test_the_recorded_answers_of_the_uncompressed_model_chose_the_question(demo_model):
    """Its answer ends after the compression and before the demo stops."""
    record = json.loads(CHOICE.read_text())
    known = [each for each in record["questions"] if each["known_from_the_text"]]
    entry = max(known, key=lambda each: each["gap"])
    assert tuple(entry["notes"]) == tuple(note.text for note in CHOSEN.notes)
    assert record["chosen"] == CHOSEN.asked
    assert record["text_tokens"] == demo.QUESTION_TEXT
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    ids = tokenizer.encode(entry["answer"], add_special_tokens=False)
    settings = CompressionConfig.parse({"compress": RECOMMENDED})
    assert 1 + (settings.resolved_lookahead or 0) == UNCOMPRESSED
    assert UNCOMPRESSED < len(ids) < demo.QUESTION_TOKENS
    assert CHOSEN.named(tokenizer.decode(ids[UNCOMPRESSED:]))


@pytest.mark.parametrize(
    ("off", "on", "expected"),
    [
        ("abcdef", "abcdef", Agreement(True, 3, 3)),
        ("abcdef", "abcdxf", Agreement(True, 1, 3)),
        ("abcdef", "abxdef", Agreement(False, 0, 3)),
        ("abcde\x02g", "abcde\x02h", Agreement(True, 2, 2)),
        ("abcde\x02g", "abcd\x02gh", Agreement(True, 1, 2)),
        ("ab\x02", "ab\x02", Agreement(True, 0, 0)),
    ],
)
def test_only_tokens_between_compression_and_first_difference_are_equal(off, on, expected):
    """Two tokens and the prefill's precede the compression; the turn ends at token 2."""
    assert agreement(reply(off), reply(on, compressed=ahead()), END) == expected
    if off == on == "abcdef":  # compressed early, more tokens are left to compare
        early = reply(on, compressed=ahead(lookahead=0))
        assert agreement(reply(off), early, END) == Agreement(True, 5, 5)


def load(**on) -> Comparison:
    """Return two requests at once, of which the second differs after the compression."""
    off = measured(reply("abcdef"), reply("stuvwx"), blocks=30)
    replies = [reply(text, compressed=ahead()) for text in ("abcdef", "stuv[x")]
    faster = measured(*replies, blocks=30, wall_s=40.0, tokens_per_s=0.3)
    return comparison(off, replace(faster, **on))


def test_the_report_has_both_servers_figures_side_by_side():
    text = printed(show_load, load(), pool=42, fit=3, instruction="Summarise [it].")
    cells = {
        cells[0]: cells[1:]
        for line in text.splitlines()
        if len(cells := re.split(r"\s{2,}", line.strip())) == 3
    }
    assert cells["requests that ran at once, mean"] == ["2.0", "2.0"]
    assert cells["requests that ran at once, maximum"] == ["3", "3"]
    assert cells["time until all were done"] == ["60.0 s", "40.0 s"]
    assert cells["output tokens per second"] == ["0.2", "0.3"]
    assert cells["preemptions"] == ["0", "0"]
    assert "Summarise [it]." in text
    assert "enough for 3 uncompressed requests" in " ".join(text.split())


def test_the_report_shows_outputs_from_the_compression_on_and_counts_equal_tokens():
    text = printed(show_outputs, load(), decode)
    assert "4 of 6 output tokens after the compression are equal" in text
    assert "by request: 3 of 3, 1 of 3" in text
    assert re.search(r"… def …\s+… def …", text)
    assert re.search(r"… vwx …\s+… v\[x …", text)  # not console markup


def test_the_report_of_the_question_has_answers_facts_and_blocks():
    one = comparison("Pep 484", "Pep 8")
    answers = [each.token_ids for each in (*one.off.replies, *one.on.replies)]
    text = printed(show_question, one, PEP, answers, [["484"], []], decode)
    assert re.search(r"answer\s+Pep 484\s+Pep 8\s*\n", text)
    assert re.search(r"facts named after the compression\s+484\s+none", text)
    assert re.search(r"KV blocks held at the end\s+14\s+5\s*\n", text)
    assert re.search(r"prompt tokens kept, mean over layers\s+1,500\s+612\s*\n", text)


def test_each_loss_is_one_line_with_a_reason():
    assert losses(comparison("abcd", "abcd"), comparison("abcd", "abcd"), []) == []
    slow = measured(reply("abcd", compressed=ahead(), first_token_s=13.0, end_s=29.0), blocks=5)
    found = losses(
        comparison(measured(reply("abcd"), blocks=14), slow),
        load(wall_s=70.0, preemptions=2),
        ["484"],
    )
    single = "A single request"
    starts = ["The answer lacks 484: ", "1 of 2 outputs change after the compression, "]
    starts += ["2 preemptions, not 0: ", f"{single}'s first token took 13 s, not 12.5 s: "]
    starts += [f"{single}'s output token took 5.33 s, not 2.5 s: "]
    starts += [f"{single} took 29 s, not 20 s: its compression took 0.50 s."]
    starts += ["All requests took 70 s, not 60 s: "]
    assert len(found) == len(starts)
    assert max(map(len, found)) <= 98
    assert all(line.startswith(start) for line, start in zip(found, starts, strict=True))
    early = comparison("abcdef", "axcdef")
    assert any("differ before the compression" in loss for loss in losses(early, early, []))


def test_the_demo_fails_without_compression_without_freed_blocks_and_for_early_differences():
    good = comparison("abcd", "abcd")
    assert failures(good, good) == []
    (message,) = failures(good, comparison("abcd", measured(reply("abcd"), blocks=5)))
    assert message.startswith("1 of 2 prompts were not compressed")
    kept = measured(reply("abcd", compressed=ahead()), blocks=14)
    (message,) = failures(comparison("abcd", kept), good)
    assert message.startswith("vLLM got no KV blocks back")
    (message,) = failures(comparison("abcd", replace(kept, last_blocks=0.0)), good)
    assert message.startswith("The KV blocks were not counted")
    (message,) = failures(comparison("abcd", "axcd"), good)
    assert "please report this" in message
    text = printed(show_losses, ["a: b."], [message])
    assert "* a: b.\n" in text
    assert "Failed: A single request's output tokens differ" in text


def test_picture_has_the_report_and_no_links_to_other_files(tmp_path):
    console = Console(file=io.StringIO(), width=100, record=True)
    show_losses(["more blocks"], [], console)
    save_picture(console, tmp_path / "report.svg", "make demo")
    svg = (tmp_path / "report.svg").read_text()
    assert "blocks" in svg
    assert set(re.findall(r"https?://[^\"' ]+", svg)) == {"http://www.w3.org/2000/svg"}


def test_the_short_form_is_the_default_and_flags_win_over_both_forms():
    def form(*flags: str) -> dict[str, int]:
        args = parse_args(list(flags))
        return {name: getattr(args, name) for name in demo.SHORT}

    assert form() == demo.SHORT
    assert form("--long") == demo.LONG
    assert form("--long", "--requests", "2") == demo.LONG | {"requests": 2}
    assert form("--tokens", "2000") == demo.SHORT | {"tokens": 2000}


def test_the_compressed_server_has_the_flags_of_the_readme_and_the_same_pool():
    alone, compressed = demo.server_flags(parse_args([])).values()
    assert compressed[: len(alone)] == alone
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (serve,) = re.findall(r"^    vllm serve \S+ (.*)$", readme, re.MULTILINE)
    added = compressed[len(alone) :]
    assert serve.split()[:4] == added[:4] == shlex.split("--kv-compress cake-chunk --kv-budget 0.2")
    assert added[4:] == ["--kv-compress-config", '{"log_requests": true}']


@pytest.mark.parametrize("flags", [[], ["--long"], ["--tokens", "1100"]], ids=" ".join)
def test_the_pool_holds_three_uncompressed_requests(demo_model, flags):
    args, tokenizer = parse_args(flags), AutoTokenizer.from_pretrained(demo_model)
    text = sections(tokenizer, args.tokens, 1)[0]
    for content, tokens in (
        (f"{text}\n\n{REQUEST}", args.max_tokens),
        (prompt(tokenizer, demo.QUESTION_TEXT, CHOSEN), demo.QUESTION_TOKENS),
    ):
        chat = [{"role": "user", "content": content}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert len(ids) + tokens <= demo.pool_blocks(args) / demo.FIT * demo.BLOCK


def turns(cached: int, first_token_s: float = 1.0) -> list[chats.Turn]:
    """Return the turns of two chats: in later turns, the second one has a cold history."""
    return [
        chats.Turn(
            chat=chat,
            turn=turn,
            prompt_tokens=800,
            cached_tokens=cached * (turn > 1) * (chat == 0),
            first_token_s=first_token_s,
        )
        for turn in (1, 2)
        for chat in (0, 1)
    ]


def test_the_report_of_chats_counts_warm_later_turns():
    text = printed(chats.show, turns(0), turns(400, 0.5), sixteen_bits=False)
    assert re.search(r"half of their prompt or more\s+0 of 2\s+1 of 2", text)
    assert re.search(r"from the prefix cache\s+0%\s+25%", text)
    assert re.search(r"first token of later turns, mean\s+1.00 s\s+0.50 s", text)
    assert chats.failures(turns(400)) == []
    (message,) = chats.failures(turns(399))
    assert message.startswith("No later turn")
    assert chats.losses(turns(0), turns(400)) == []
    (loss,) = chats.losses(turns(0), turns(400, 1.1))
    assert loss == "A chat's first token took 1.1 s with --kv-reuse, and 1 s without."


def test_no_chat_exceeds_the_pool_or_the_model_length_of_its_server(demo_model):
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    for text in sections(tokenizer, chats.TEXT_TOKENS, chats.CHATS):
        messages = [{"role": "user", "content": f"{text}\n\n{REQUEST}"}]
        for _ in range(chats.TURNS - 1):
            messages.append({"role": "assistant", "content": " word" * chats.REPLY_TOKENS})
            messages.append({"role": "user", "content": max(chats.FOLLOW_UPS, key=len)})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert len(ids) + chats.REPLY_TOKENS <= chats.CHAT_TOKENS
    smallest = chats.pool_blocks(compressed=True, sixteen_bits=False)
    assert smallest * chats.BLOCK >= chats.CHAT_TOKENS


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
