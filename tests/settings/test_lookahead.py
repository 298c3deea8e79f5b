"""The look-ahead: its limits, its methods, and the choices of requests."""

import pytest

from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.methods.registry import PRESETS, RECOMMENDED
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

ENGINE = CompressionConfig.parse({"compress": "cake", "lookahead": 16, "allow_override": "all"})
BY_WINDOW = {*PRESETS} - {"streamingllm", "h2o", "d2o", "keydiff", "lagkv", "random"}


@pytest.mark.parametrize("method", sorted(PRESETS))
def test_only_methods_that_score_by_a_window_have_a_lookahead(method):
    raw = {"compress": method, "lookahead": 16}
    if method in BY_WINDOW:
        parsed = CompressionConfig.parse(raw)
        assert parsed.resolved_lookahead == 16
        assert parsed.resolved_window == min(PRESETS[method].window, 16)
        window = 32 if method == RECOMMENDED else parsed.resolved_window
        assert parsed.method.lookahead_window == window
        assert ENGINE.variant(method) == parsed.variant(budget=0.2).with_values()
        return
    with pytest.raises(ConfigError, match=f"'{method}' does not; set lookahead to 0, or choose"):
        CompressionConfig.parse(raw)
    # requests can still choose the method, and are compressed after their prefill
    assert ENGINE.variant(method).resolved_lookahead == 0


@pytest.mark.parametrize(
    ("lookahead", "message"),
    [
        (1, "a variance over at least 2 queries; set lookahead to at least 2, or to 0"),
        (-1, "lookahead: input should be greater than or equal to 0, got -1"),
        (1025, "lookahead: input should be less than or equal to 1024, got 1025"),
        (True, "lookahead must be a whole number of tokens, got True"),
        (0.5, "lookahead must be a whole number of tokens, got 0.5"),
    ],
)
def test_what_is_refused(lookahead, message):
    with pytest.raises(ConfigError) as caught:
        CompressionConfig.parse({"compress": "cake", "lookahead": lookahead})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lookahead_slots": 0}, "lookahead_slots: input should be greater than or equal to 1"),
        ({"lookahead_slots": True}, "lookahead_slots: input should be a valid integer, got True"),
        ({"lookahead_slots": 4, "decode_budget": 512}, "=4 cannot be combined with --kv-decode-b"),
    ],
)
def test_meaningless_lookahead_slots_are_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        CompressionConfig.parse({"compress": "cake", "lookahead": 16, **changes})
    assert message in str(caught.value)


def test_only_the_recommended_preset_has_a_lookahead_by_default():
    """The papers' presets compress after the prefill."""
    parsed = {name: CompressionConfig.parse({"compress": name}) for name in PRESETS}
    assert {name for name in PRESETS if parsed[name].resolved_lookahead} == {RECOMMENDED}
    zero = CompressionConfig.parse({"compress": "cake", "lookahead": 0})
    assert zero.resolved_window == PRESETS["cake"].window


@pytest.mark.parametrize(
    ("changes", "lookahead", "window"),
    [
        ({}, 32, 48),
        ({"lookahead": 0}, 0, 16),
        ({"lookahead": 16}, 16, 32),
        ({"lookahead": 64}, 64, 80),
        ({"selector": "chunks", "selector_params": {"size": 20}, "allocator": "cake"}, 32, 48),
        ({"allocator_params": {"tau1": 3.0}}, 32, 48),
        ({"window": 8}, 32, 8),
        ({"window": 64}, 32, 64),
        ({"window": 64, "lookahead": 0}, 0, 64),
        ({"allocator": "uniform"}, 32, 16),
        ({"selector_params": {"size": 10}}, 32, 16),
        ({"scorer": "caote"}, 0, 32),
        ({"scorer": "lagkv", "selector": "topk"}, 0, 32),
    ],
)
def test_a_presets_lookahead_applies_only_with_its_scorer(changes, lookahead, window):
    """The preset scores with fewer queries after the prefill than after the look-ahead.

    With an explicit window, the prompt's queries are added to the output's only if the window is
    longer than the look-ahead. Replaced parts change the window too.
    """
    parsed = CompressionConfig.parse({"compress": RECOMMENDED, **changes})
    assert (parsed.resolved_lookahead, parsed.method.lookahead_window) == (lookahead, window)
    # compression right after the prefill scores as without a look-ahead
    after_prefill = min(parsed.parts.window, lookahead or window)
    assert parsed.resolved_window == changes.get("window", after_prefill)
    assert CompressionConfig.parse(parsed.to_additional_config()) == parsed


@pytest.mark.parametrize(
    ("extra_args", "lookahead", "window"),
    [
        ({"kv_lookahead": 16}, 16, 16),
        ({"kv_lookahead": 8.0}, 8, 8),
        ({"kv_lookahead": 0}, 0, 32),
        ({"kv_lookahead": 4, "kv_compress": "snapkv"}, 4, 4),
        ({"kv_compress": "snapkv"}, 16, 16),
        ({"kv_compress": "h2o"}, 0, 32),
        ({"kv_compress": "h2o", "kv_lookahead": 0}, 0, 32),
    ],
)
def test_requests_can_choose_a_lookahead(extra_args, lookahead, window):
    parsed = RequestOptions.parse(ENGINE, extra_args).settings
    assert (parsed.resolved_lookahead, parsed.resolved_window) == (lookahead, window)


@pytest.mark.parametrize(
    ("extra_args", "kind", "message"),
    [
        ({"kv_lookahead": 17}, "out_of_bounds", "at most 16 for 'cake' on this server, got 17"),
        ({"kv_lookahead": 1, "kv_compress": "h2o"}, "out_of_bounds", "at most 0 for 'h2o'"),
        ({"kv_lookahead": 1}, "invalid", "lookahead must be at least 2 for 'cake', got 1"),
        ({"kv_lookahead": -1}, "invalid", "a whole number of at least 0 output tokens"),
        ({"kv_lookahead": True}, "invalid", "got True"),
        ({"kv_lookahead": "8"}, "invalid", "got '8'"),
        ({"kv_lookahead": 8, "kv_compress": "off"}, "invalid", "kv_lookahead=8 needs a method"),
        ({"kv_lookahed": 8}, "invalid", "did you mean 'kv_lookahead'"),
    ],
)
def test_forbidden_lookaheads_of_requests_are_refused(extra_args, kind, message):
    with pytest.raises(OverrideError, match=message.replace("'", ".")) as caught:
        RequestOptions.parse(ENGINE, extra_args)
    assert caught.value.reason == kind
