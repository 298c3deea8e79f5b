"""The files of a comparison run: reading complete and broken ones, and resuming."""

import json

import pytest

from outcomes import outcome
from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.compare.journal import Journal
from vllm_kvcompress.errors import ConfigError

CELLS = [Cell(method="snapkv", budget=0.2), Cell(method="cake", budget=256)]
SETTINGS = {"model": "m", "prompts": "digest"}


def open_journal(folder):
    return Journal(folder, keep_text=False)


@pytest.fixture
def run_folder(tmp_path):
    """Return a folder of a run with two outcomes."""
    with open_journal(tmp_path / "out") as run:
        assert run.open(SETTINGS, CELLS) == []
        run.add(outcome("a"))
        run.add(outcome("b", CELLS[1], kept_tokens=None, token_s=None, score=None))
    return tmp_path / "out"


def test_outcomes_are_read_back_unchanged(run_folder):
    with open_journal(run_folder) as run:
        first, second = run.open(SETTINGS, CELLS)
        run.add(outcome("c"))
    assert first == outcome("a")
    assert (second.cell, second.kept_tokens) == (CELLS[1], None)
    with open_journal(run_folder) as run:
        assert len(run.open(SETTINGS, CELLS)) == 3


@pytest.mark.parametrize("cut", [1, 20])
def test_an_incomplete_last_line_is_removed(run_folder, cut):
    lines = run_folder / "journal.jsonl"
    original = lines.read_bytes()
    lines.write_bytes(original[:-cut])
    with open_journal(run_folder) as run:
        assert [o.key for o in run.open(SETTINGS, CELLS)] == ["a"]
        run.add(outcome("b", CELLS[1], kept_tokens=None, token_s=None, score=None))
    assert lines.read_bytes() == original


def test_an_invalid_last_line_is_removed(run_folder):
    with (run_folder / "journal.jsonl").open("ab") as lines:
        lines.write(b"\0\0\0\n")
    with open_journal(run_folder) as run:
        assert len(run.open(SETTINGS, CELLS)) == 2


@pytest.mark.parametrize("broken", ["{}", "no", '{"key": 1}'])
def test_a_broken_line_before_the_last_is_an_error(run_folder, broken):
    lines = run_folder / "journal.jsonl"
    lines.write_text(f"{broken}\n{lines.read_text()}")
    with open_journal(run_folder) as run, pytest.raises(ConfigError, match="line 1 is broken"):
        run.open(SETTINGS, CELLS)


def test_a_run_with_other_settings_is_refused_and_unchanged(run_folder):
    before = (run_folder / "journal.jsonl").read_bytes()
    with (
        open_journal(run_folder) as run,
        pytest.raises(ConfigError, match="run with different model, seed;"),
    ):
        run.open({"model": "other", "prompts": "digest", "seed": 1}, CELLS)
    assert (run_folder / "journal.jsonl").read_bytes() == before


def test_cells_may_be_added_but_not_removed(run_folder):
    with (
        open_journal(run_folder) as run,
        pytest.raises(ConfigError, match="holds a run that also has cake 256"),
    ):
        run.open(SETTINGS, CELLS[:1])
    more_cells = [*CELLS, Cell(method="tova", budget=0.1)]
    with open_journal(run_folder) as run:
        assert len(run.open(SETTINGS, more_cells)) == 2
    with open_journal(run_folder) as run, pytest.raises(ConfigError, match=r"tova 0\.1"):
        run.open(SETTINGS, CELLS)


def test_a_folder_is_locked_by_one_run(run_folder):
    with open_journal(run_folder), pytest.raises(ConfigError, match="in use by another run"):
        open_journal(run_folder)


def test_out_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a writable folder"):
        open_journal(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is broken"),
        ("[]", "it must be an object"),
        (json.dumps({"version": 0}), "written by another version"),
        (None, "no run.json"),
    ],
)
def test_a_missing_or_broken_run_json_is_an_error(run_folder, text, message):
    path = run_folder / "run.json"
    path.unlink() if text is None else path.write_text(text)
    with open_journal(run_folder) as run, pytest.raises(ConfigError, match=message):
        run.open(SETTINGS, CELLS)


def test_the_compressed_count_may_be_unknown(run_folder):
    with open_journal(run_folder) as run:
        run.open(SETTINGS, CELLS)
        assert run.compressed_count == 0
        run.set_compressed_count(None)
        assert run.compressed_count is None
        run.set_compressed_count(7)
        assert run.compressed_count == 7
