"""Comparison on a full disk: finished results are kept and the report is printed."""

import json
import resource
from contextlib import contextmanager

import pytest

from fake_vllm import read_report, write_prompts


@contextmanager
def file_size_limit(max_bytes):
    """Fail every write of this process beyond `max_bytes` of a file, None for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if max_bytes is None else max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def run_limited(run_compare, tmp_path):
    """Return a function that compares `count` prompts with one method and budget."""

    def run(count, line="", max_bytes=None):
        write_prompts(tmp_path / "mine.jsonl", range(count))
        with file_size_limit(max_bytes):
            return run_compare(f"--methods snapkv --budgets 0.2 {line}", numbers=None)

    return run


def last_line(result):
    assert "Traceback" not in result.err
    return result.err.strip().splitlines()[-1]


@pytest.mark.parametrize("flags", ["", "--keep-text"])
def test_a_disk_that_fills_up_keeps_finished_results(run_limited, tmp_path, flags):
    result = run_limited(20, flags, max_bytes=3000)
    assert result.status == 2
    message = last_line(result)
    assert message.startswith("kvcompress: error: --out out cannot be written ([Errno 27]")
    journal = tmp_path / "out" / "journal.jsonl"
    num_saved = journal.read_bytes().count(b"\n")
    assert 0 < num_saved < 20
    assert f"{num_saved} of 20 results are saved in out; run the same command to resume" in message
    assert f"{num_saved} of {num_saved}" in result.out
    result = run_limited(20, flags)
    assert f"Resuming: {num_saved} of 20 results were saved earlier." in result.err
    report = read_report(tmp_path)
    assert (report["complete"], report["cells"][0]["asked"]) == (True, 20)
    assert len(journal.read_text().splitlines()) == 20


def test_the_report_is_printed_if_it_cannot_be_written(run_limited):
    result = run_limited(3, max_bytes=3000)
    assert result.status == 2
    assert "the report cannot be written to out ([Errno 27]" in last_line(result)
    assert "3 of 3 results are saved in out" in last_line(result)
    assert "At least 149 are needed." in result.out


def test_a_full_disk_is_an_error_before_any_prompt_is_sent(run_limited, fake):
    result = run_limited(3, max_bytes=0)
    assert (result.status, fake.prompt_requests) == (2, [])
    assert "--out out cannot be written ([Errno 27]" in last_line(result)
    assert "free some disk space, or use another folder" in last_line(result)


def test_a_lone_surrogate_is_saved_as_it_was_sent(run_limited, fake, tmp_path):
    """Clients that cut a text between UTF-16 units send lone surrogates, which UTF-8 lacks."""
    run_limited(1)
    write_prompts(tmp_path / "mine.jsonl", [4])
    text = (tmp_path / "mine.jsonl").read_text().replace("secret 4", "\\ud83d \u20ac 4")
    (tmp_path / "halves.jsonl").write_text(text, encoding="utf-8")
    result = run_limited(1, "--prompts halves.jsonl --keep-text --out halves")
    assert result.status == 1, result.err
    sent = fake.prompt_requests[-1]["messages"]
    assert sent[0]["content"].endswith("\ud83d \u20ac 4")
    lines = (tmp_path / "halves" / "texts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["messages"] for line in lines] == [sent, sent]
    assert "\u20ac" in lines[0]
