"""What a run leaves behind, whole or cut off, and who may go on with it."""

import json

import pytest

from outcomes import outcome
from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.compare.journal import Journal
from vllm_kvcompress.errors import ConfigError

CELLS = [Cell(method="snapkv", budget=0.2), Cell(method="cake", budget=256)]
SETTINGS = {"model": "m", "prompts": "digest"}


def journal(folder):
    return Journal(folder, keep_text=False)


@pytest.fixture
def left(tmp_path):
    """A folder with two lines."""
    with journal(tmp_path / "out") as run:
        assert run.open(SETTINGS, CELLS) == []
        run.add(outcome("a"))
        run.add(outcome("b", CELLS[1], kept_tokens=None, token_s=None, score=None))
    return tmp_path / "out"


def test_lines_come_back_as_they_were(left):
    with journal(left) as run:
        first, second = run.open(SETTINGS, CELLS)
        run.add(outcome("c"))
    assert first == outcome("a")
    assert (second.cell, second.kept_tokens) == (CELLS[1], None)
    with journal(left) as run:
        assert len(run.open(SETTINGS, CELLS)) == 3


@pytest.mark.parametrize("cut", [1, 20])
def test_a_line_that_was_cut_off_is_taken_away(left, cut):
    lines = left / "journal.jsonl"
    whole = lines.read_bytes()
    lines.write_bytes(whole[:-cut])
    with journal(left) as run:
        assert [o.key for o in run.open(SETTINGS, CELLS)] == ["a"]
        run.add(outcome("b", CELLS[1], kept_tokens=None, token_s=None, score=None))
    assert lines.read_bytes() == whole


def test_a_last_line_of_garbage_is_taken_away(left):
    with (left / "journal.jsonl").open("ab") as lines:
        lines.write(b"\0\0\0\n")
    with journal(left) as run:
        assert len(run.open(SETTINGS, CELLS)) == 2


@pytest.mark.parametrize("broken", ["{}", "no", '{"key": 1}'])
def test_a_broken_line_in_the_middle_is_no_accident(left, broken):
    lines = left / "journal.jsonl"
    lines.write_text(f"{broken}\n{lines.read_text()}")
    with journal(left) as run, pytest.raises(ConfigError, match="line 1 is broken"):
        run.open(SETTINGS, CELLS)


def test_a_run_with_other_settings_is_left_alone(left):
    before = (left / "journal.jsonl").read_bytes()
    with journal(left) as run, pytest.raises(ConfigError, match="run with another model, seed;"):
        run.open({"model": "other", "prompts": "digest", "seed": 1}, CELLS)
    assert (left / "journal.jsonl").read_bytes() == before


def test_cells_may_be_added_and_not_left_out(left):
    with journal(left) as run, pytest.raises(ConfigError, match="has a run with cake 256 as well"):
        run.open(SETTINGS, CELLS[:1])
    more = [*CELLS, Cell(method="tova", budget=0.1)]
    with journal(left) as run:
        assert len(run.open(SETTINGS, more)) == 2
    with journal(left) as run, pytest.raises(ConfigError, match=r"tova 0\.1"):
        run.open(SETTINGS, CELLS)


def test_a_folder_is_one_runs_at_a_time(left):
    with journal(left), pytest.raises(ConfigError, match="in use by another run"):
        journal(left)


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a folder to write in"):
        journal(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is broken"),
        ("[]", "it must be an object"),
        (json.dumps({"version": 7}), "of another version"),
        (None, "no run.json"),
    ],
)
def test_what_the_run_was_about_is_lost(left, text, said):
    (left / "run.json").unlink() if text is None else (left / "run.json").write_text(text)
    with journal(left) as run, pytest.raises(ConfigError, match=said):
        run.open(SETTINGS, CELLS)


def test_a_killed_run_cannot_say_what_was_compressed(left):
    with journal(left) as run:
        run.open(SETTINGS, CELLS)
        assert run.forget_count() == 0
        assert run.counted is None
        run.count(7)
        assert run.counted == 7
