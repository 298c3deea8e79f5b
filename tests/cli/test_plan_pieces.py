"""``kvcompress plan`` for prompts that are compressed in pieces."""

import shlex
from functools import partial

import pytest

from engines import BLOCK

FLAGS = shlex.split(
    "--len 2000 --max-tokens 70 --kv-budget 0.2 --kv-compress snapkv --dtype float32 --device cpu"
    f" --block-size {BLOCK} --kv-min-prompt 500 --kv-piece 256"
)


@pytest.fixture
def pieces_text(plan_text, tiny):
    """Return a function that returns the output of ``kvcompress plan`` with `FLAGS`."""
    return partial(plan_text, tiny, *FLAGS)


def test_a_max_whole_that_holds_twice_the_budget_is_suggested(pieces_text):
    small, large = (pieces_text("--kv-max-whole", max_whole) for max_whole in (700, 1088))
    assert "holds 416 tokens between pieces and keeps 400 after prefill." in small
    assert "--kv-max-whole 1088 would hold twice the budget" in small
    assert "holds 800 tokens between pieces and keeps 400 after prefill." in large
    assert "twice" not in large


@pytest.mark.parametrize(
    "flags",
    [
        ("--kv-budget", 0.5),  # with --kv-max-whole 2288, the prompt would not be in pieces
        ("--kv-memory", 0.0018),  # the pool has fewer than 1,088 tokens
    ],
)
def test_a_max_whole_that_cannot_help_is_not_suggested(pieces_text, flags):
    text = pieces_text("--kv-max-whole", 700, *flags)
    assert "A smaller --kv-piece holds more tokens between pieces." in text
    assert "would hold twice the budget" not in text


def test_blocks_of_a_lookahead_start_from_the_last_piece(pieces_text):
    """A request holds what the last piece left, the rest of the prompt and 40 output tokens."""
    text = pieces_text("--kv-max-whole", 1088, "--kv-lookahead", 40)
    held = -(-800 // BLOCK) + -(-(2000 - 1792 + 40) // BLOCK)
    assert (
        f"During the look-ahead, the first 40 of 70 output tokens, a request holds {held} blocks"
    ) in text
