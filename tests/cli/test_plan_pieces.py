"""``kvcompress plan`` of prompts in pieces: what they hold, when, and what would hold more."""

import pytest

from engines import BLOCK

FLAGS = (
    *("--len", 2000, "--max-tokens", 70, "--kv-budget", 0.2, "--kv-compress", "snapkv"),
    *("--block-size", BLOCK, "--dtype", "float32", "--device", "cpu"),
    *("--kv-min-prompt", 500, "--kv-piece", 256),
)


@pytest.fixture
def said(typed, tiny):
    """What it says of such a prompt, as one line."""

    def plan(*flags):
        found = typed("plan", tiny, *FLAGS, *flags)
        assert found.status == 0, found
        return " ".join(found.out.split())

    return plan


def test_what_it_holds_and_what_would_hold_more(said):
    scarce, roomy = (said("--kv-max-whole", whole) for whole in (700, 1088))
    assert "holds 416 tokens until its end, and then keeps 400" in scarce
    assert "--kv-max-whole 1088 would hold twice the budget" in scarce
    assert "holds 800 tokens until its end, and then keeps 400." in roomy
    assert "twice" not in roomy


@pytest.mark.parametrize(
    "flags",
    [
        ("--kv-budget", 0.5),  # 2,288 would let it stand whole
        ("--kv-memory", 0.0018),  # 1,088 are more than the pool has
    ],
)
def test_nothing_is_named_that_cannot_help(said, flags):
    text = said("--kv-max-whole", 700, *flags)
    assert "a smaller --kv-piece holds more." in text
    assert "would hold twice the budget" not in text


def test_what_a_look_ahead_holds_is_not_what_its_pieces_took(said):
    """It begins with what the last piece left, and 40 tokens behind that."""
    text = said("--kv-max-whole", 1088, "--kv-lookahead", 40)
    held = -(-800 // BLOCK) + -(-(2000 - 1792 + 40) // BLOCK)
    assert f"For 40 of 70 tokens of its answer a request holds {held} blocks" in text
