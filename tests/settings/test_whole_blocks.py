"""Default lengths are rounded to whole KV blocks."""

import pytest

from vllm_kvcompress.planning.model_traits import Traits
from vllm_kvcompress.refusals.rule import refusal
from vllm_kvcompress.refusals.server import SERVER, Server
from vllm_kvcompress.schedules.outputs import OutputGroupSchedule
from vllm_kvcompress.settings.config import CompressionConfig

BOUNDED = {"compress": "cake", "decode_budget": 600, "max_whole": 8192}


@pytest.mark.parametrize(
    ("block", "interval", "piece"),
    [(16, 128, 4096), (48, 96, 4080), (96, 96, 4032), (528, 528, 3696), (1056, 1056, 3168)],
)
def test_defaults_are_rounded_to_whole_blocks(block, interval, piece):
    fitting = CompressionConfig.parse(BOUNDED).in_whole_blocks(block)
    assert (fitting.decode.interval, fitting.pieces.length) == (interval, piece)
    assert fitting.in_whole_blocks(block) == fitting
    again = fitting.variant("snapkv", 0.5)
    assert (again.decode.interval, again.pieces.length) == (interval, piece)


@pytest.mark.parametrize("explicit", [{"decode_interval": 128}, {"piece": 4096}])
def test_explicit_values_are_not_rounded(explicit):
    """Also after another process has read the settings from vLLM's configuration."""
    parsed = CompressionConfig.parse(BOUNDED | explicit)
    for settings in (parsed, CompressionConfig.parse(parsed.to_additional_config())):
        fitting = settings.in_whole_blocks(528)
        assert all(fitting.value(key) == value for key, value in explicit.items())


def test_the_rounded_interval_holds_the_decode_window():
    parsed = CompressionConfig.parse(BOUNDED | {"decode_window": 120})
    assert parsed.in_whole_blocks(96).decode.interval == 192
    assert parsed.in_whole_blocks(72).decode.interval == 144


def test_rounding_depends_on_which_fields_were_set():
    explicit = CompressionConfig.parse(BOUNDED | {"decode_interval": 128})
    default = CompressionConfig.parse(BOUNDED)
    assert explicit == default
    for _ in range(2):
        assert explicit.in_whole_blocks(528).decode.interval == 128
        assert default.in_whole_blocks(528).decode.interval == 528


def test_unused_lengths_are_not_rounded():
    parsed = CompressionConfig.parse({"compress": "cake"})
    assert parsed.in_whole_blocks(528) is parsed


@pytest.mark.parametrize("interval", [1, 100, 128])
def test_interval_of_packed_outputs_may_be_any_number(interval):
    """It is rounded up to whole packed pages, whose size depends on the cache's dtype."""
    raw = {"compress": "cake", "packed_dtype": "k4v3", "decode_interval": interval}
    parsed = CompressionConfig.parse(raw)
    assert parsed.in_whole_blocks(48) is parsed
    assert refusal(SERVER, Server(settings=parsed, model=Traits(), block_size=48)) is None
    schedule = OutputGroupSchedule(settings=parsed, max_tokens=9999, page_tokens=192)
    assert schedule.interval == 192
