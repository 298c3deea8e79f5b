"""Lengths that nobody gave follow the KV block."""

import pytest

from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.whole_blocks import in_whole_blocks

BOUNDED = {"compress": "cake", "decode_budget": 600, "max_whole": 8192}


@pytest.mark.parametrize(
    ("block", "interval", "piece"),
    [(16, 128, 4096), (48, 96, 4080), (96, 96, 4032), (528, 528, 3696), (1056, 1056, 3168)],
)
def test_the_largest_multiple_within_the_usual_length_or_one_block(block, interval, piece):
    fitting = in_whole_blocks(CompressionConfig.parse(BOUNDED), block)
    assert (fitting.decode_interval, fitting.piece) == (interval, piece)
    assert in_whole_blocks(fitting, block) == fitting
    again = fitting.variant("snapkv", 0.5)
    assert (again.decode_interval, again.piece) == (interval, piece)


@pytest.mark.parametrize("given", [{"decode_interval": 128}, {"piece": 4096}])
def test_what_is_given_stays_also_where_it_is_the_usual_one(given):
    """And once more where another process reads it off vLLM's configuration."""
    own = CompressionConfig.parse(BOUNDED | given)
    for settings in (own, CompressionConfig.parse(own.to_additional_config())):
        fitting = in_whole_blocks(settings, 528)
        assert all(getattr(fitting, key) == value for key, value in given.items())


def test_an_interval_holds_the_decode_window():
    own = CompressionConfig.parse(BOUNDED | {"decode_window": 120})
    assert in_whole_blocks(own, 96).decode_interval == 192
    assert in_whole_blocks(own, 72).decode_interval == 144


def test_settings_that_are_equal_may_differ_in_what_was_given():
    given = CompressionConfig.parse(BOUNDED | {"decode_interval": 128})
    usual = CompressionConfig.parse(BOUNDED)
    assert given == usual
    for _ in range(2):
        assert in_whole_blocks(given, 528).decode_interval == 128
        assert in_whole_blocks(usual, 528).decode_interval == 528


def test_what_bounds_nothing_is_left_alone():
    own = CompressionConfig.parse({"compress": "cake"})
    assert in_whole_blocks(own, 528) is own
