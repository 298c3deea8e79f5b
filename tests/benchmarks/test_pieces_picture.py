"""The plot of prompts in pieces does not depend on the order of the files."""

import json
from pathlib import Path

import pytest

from benchmarks import pieces_picture
from benchmarks.pieces_picture import lines_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def result(tokens, seconds):
    rows = {"off": {"first_token_s": seconds, "most_blocks": tokens // 128}}
    return {"shapes": {"tokens": tokens}, "rows": rows}


def test_two_files_with_one_length_are_an_error():
    first, second = result(8000, 110.0), result(16000, 350.0)
    expected = {"off": {8000: 110.0, 16000: 350.0}}
    assert lines_of([first, second], "first_token_s") == expected
    assert lines_of([second, first], "first_token_s") == expected
    with pytest.raises(
        ValueError, match="got off twice with 8000 tokens: pass only one of the files"
    ):
        lines_of([first, second, result(8000, 90.0)], "first_token_s")


def test_the_documented_plot_command_finds_its_lines():
    """The module's docstring has the command for the committed picture."""
    command = pieces_picture.__doc__.split("python -m benchmarks.pieces_picture ")[1]
    files = [RESULTS / name for name in command.split(" --out")[0].split() if name != "\\"]
    lines = lines_of([json.loads(file.read_text()) for file in files], "first_token_s")
    assert {name for name, line in lines.items() if len(line) > 1} == {"off", "768@4096"}
