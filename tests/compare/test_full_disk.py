"""A disk that is full, or takes no more of a file: what was found is kept, and printed."""

import json
import resource
from contextlib import contextmanager

import pytest

from fake_vllm import write_prompts


@contextmanager
def files_of_at_most(size):
    """Every write of this process past `size` bytes of a file fails, where one is given."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def asked(compare, fake, tmp_path):
    """Compare so many prompts at one method and budget."""

    def asking(count, *more, limit=None):
        write_prompts(tmp_path / "mine.jsonl", range(count))
        with files_of_at_most(limit):
            return compare(
                "--url",
                fake.url,
                "--prompts",
                "mine.jsonl",
                "--concurrency",
                1,
                "--methods",
                "snapkv",
                "--budgets",
                "0.2",
                *more,
            )

    return asking


def last_line(done):
    assert "Traceback" not in done.err
    return done.err.strip().splitlines()[-1]


@pytest.mark.parametrize("flags", [[], ["--keep-text"]])
def test_it_is_full_on_the_way(asked, tmp_path, flags):
    done = asked(20, *flags, limit=3000)
    assert done.status == 2
    said = last_line(done)
    assert said.startswith("kvcompress: error: --out out cannot be written ([Errno 27]")
    journal = tmp_path / "out" / "journal.jsonl"
    kept = journal.read_bytes().count(b"\n")
    assert 0 < kept < 20
    assert f"{kept} of 20 are done and kept in out; the same command goes on" in said
    assert f"{kept} of {kept}" in done.out
    done = asked(20, *flags)
    assert f"{kept} of 20 are there already." in done.err
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (found["complete"], found["cells"][0]["asked"]) == (True, 20)
    assert len(journal.read_text().splitlines()) == 20


def test_it_has_no_room_for_the_report(asked):
    done = asked(3, limit=3000)
    assert done.status == 2
    assert "out cannot have the report ([Errno 27]" in last_line(done)
    assert "3 of 3 are done and kept in out" in last_line(done)
    assert "It takes 149." in done.out


def test_it_takes_nothing_at_all(asked, fake):
    done = asked(3, limit=0)
    assert (done.status, fake.prompts) == (2, [])
    assert "--out out cannot be written ([Errno 27]" in last_line(done)
    assert "make room there, or give another folder" in last_line(done)


def test_half_of_a_pair_is_kept_as_it_was_sent(asked, fake, tmp_path):
    """Which a client that cuts a text by its letters leaves, and UTF-8 has no sign for."""
    asked(1)
    write_prompts(tmp_path / "mine.jsonl", [4])
    text = (tmp_path / "mine.jsonl").read_text().replace("secret 4", "\\ud83d \u20ac 4")
    (tmp_path / "halves.jsonl").write_text(text, encoding="utf-8")
    done = asked(1, "--prompts", "halves.jsonl", "--keep-text", "--out", "halves")
    assert done.status == 1, done.err
    sent = fake.prompts[-1]["messages"]
    assert sent[0]["content"].endswith("\ud83d \u20ac 4")
    lines = (tmp_path / "halves" / "texts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["messages"] for line in lines] == [sent, sent]
    assert "\u20ac" in lines[0]
