"""The picture of prompts in pieces: what is drawn does not depend on the order of files."""

import json
from pathlib import Path

import pytest

from benchmarks.pieces_picture import lines_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def result(tokens, seconds):
    rows = {"off": {"first_token_s": seconds, "most_blocks": tokens // 128}}
    return {"shapes": {"tokens": tokens}, "rows": rows}


def test_each_length_is_in_one_file():
    one, other = result(8000, 110.0), result(16000, 350.0)
    want = {"off": {8000: 110.0, 16000: 350.0}}
    assert lines_of([one, other], "first_token_s") == want
    assert lines_of([other, one], "first_token_s") == want
    with pytest.raises(ValueError, match="got off twice with 8000 tokens; name one of the files"):
        lines_of([one, other, result(8000, 90.0)], "first_token_s")


def test_what_the_documentation_names_can_be_drawn():
    """The command that docs/measurements-appendix.md gives for the committed picture."""
    page = (RESULTS.parents[1] / "docs" / "measurements-appendix.md").read_text()
    command = page.split("python -m benchmarks.pieces_picture ")[1].split("`")[0]
    files = [RESULTS / name for name in command.split(" --out")[0].split() if name != "\\"]
    lines = lines_of([json.loads(file.read_text()) for file in files], "first_token_s")
    assert {name for name, line in lines.items() if len(line) > 1} == {"off", "768@4096"}
