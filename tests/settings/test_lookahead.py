"""How long a look-ahead may be, for which methods, and what requests may ask for."""

import pytest

from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.methods.presets import PRESETS, RECOMMENDED
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.lookahead import YIELDS
from vllm_kvcompress.settings.method_of import lookahead_window
from vllm_kvcompress.settings.overrides import settings_for

ENGINE = CompressionConfig.parse({"compress": "cake", "lookahead": 16, "allow_override": "all"})
BY_WINDOW = {
    "snapkv",
    "pyramidkv",
    "tova",
    "cake",
    "dynamickv",
    "chunkkv",
    "caote",
    "fastcaote",
    "defensivekv",
    "layer-defensivekv",
    "cake-chunk",
}


@pytest.mark.parametrize("method", sorted(PRESETS))
def test_methods_that_judge_by_the_latest_queries_look_ahead(method):
    raw = {"compress": method, "lookahead": 16}
    if method in BY_WINDOW:
        own = CompressionConfig.parse(raw)
        assert own.resolved_lookahead == 16
        assert own.resolved_window == min(PRESETS[method].window, 16)
        assert lookahead_window(own) == (32 if method == RECOMMENDED else own.resolved_window)
        assert ENGINE.variant(method) == own.variant(budget=0.2).model_copy()
        return
    with pytest.raises(ConfigError, match=f"'{method}' does not; set lookahead to 0, or choose"):
        CompressionConfig.parse(raw)
    # requests may ask for it all the same, and are packed at the end of their prefill
    assert ENGINE.variant(method).resolved_lookahead == 0


@pytest.mark.parametrize(
    ("lookahead", "says"),
    [
        (1, "at least 2 for 'cake', got 1; set lookahead to 2 or more, or to 0"),
        (-1, "lookahead: input should be greater than or equal to 0, got -1"),
        (1025, "lookahead: input should be less than or equal to 1024, got 1025"),
        (True, "lookahead must be a whole number of tokens, got True"),
        (0.5, "lookahead must be a whole number of tokens, got 0.5"),
    ],
)
def test_what_is_refused(lookahead, says):
    with pytest.raises(ConfigError) as caught:
        CompressionConfig.parse({"compress": "cake", "lookahead": lookahead})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"lookahead_slots": 0}, "lookahead_slots: input should be greater than or equal to 1"),
        ({"lookahead_slots": True}, "lookahead_slots: input should be a valid integer, got True"),
        ({"lookahead_slots": 4, "decode_budget": 512}, "=4 cannot be set with --kv-decode-budget"),
    ],
)
def test_slots_that_mean_nothing(more, says):
    with pytest.raises(ConfigError) as caught:
        CompressionConfig.parse({"compress": "cake", "lookahead": 16, **more})
    assert says in str(caught.value)


def test_three_words_say_when_it_yields():
    own = [
        CompressionConfig.parse({"compress": "cake", "lookahead_yields": word}).lookahead_yields
        for word in YIELDS
    ]
    assert tuple(own) == YIELDS
    assert CompressionConfig.parse({"compress": "cake"}).lookahead_yields == "preemption"
    for word in ("wait", True, None):
        with pytest.raises(ConfigError, match=r"lookahead_yields=.* is unknown.* choose from"):
            CompressionConfig.parse({"compress": "cake", "lookahead_yields": word})


def test_only_the_recommended_preset_looks_ahead_by_itself():
    """The papers' presets are packed when their prefill ends."""
    own = {name: CompressionConfig.parse({"compress": name}) for name in PRESETS}
    assert {name for name in PRESETS if own[name].resolved_lookahead} == {RECOMMENDED}
    zero = CompressionConfig.parse({"compress": "cake", "lookahead": 0})
    assert zero.resolved_window == PRESETS["cake"].window


@pytest.mark.parametrize(
    ("more", "lookahead", "window"),
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
def test_a_presets_own_look_ahead_goes_with_its_scorer(more, lookahead, window):
    """By a prompt's end it judges with fewer queries than by an answer's beginning.

    A longer window that is asked for has the prompt's last queries beside the answer's, as its
    own has. A preset whose parts are replaced has them at any time.
    """
    own = CompressionConfig.parse({"compress": RECOMMENDED, **more})
    assert (own.resolved_lookahead, lookahead_window(own)) == (lookahead, window)
    # what is packed when its prefill ends is judged as without a look-ahead
    assert own.resolved_window == more.get("window", min(own.parts.window, lookahead or window))
    assert CompressionConfig.parse(own.to_additional_config()) == own


@pytest.mark.parametrize(
    ("asked", "lookahead", "window"),
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
def test_requests_choose(asked, lookahead, window):
    own = settings_for(ENGINE, asked)
    assert (own.resolved_lookahead, own.resolved_window) == (lookahead, window)


@pytest.mark.parametrize(
    ("asked", "kind", "says"),
    [
        ({"kv_lookahead": 17}, "out_of_bounds", "at most 16 for 'cake' on this server, got 17"),
        ({"kv_lookahead": 1, "kv_compress": "h2o"}, "out_of_bounds", "at most 0 for 'h2o'"),
        ({"kv_lookahead": 1}, "invalid", "lookahead must be at least 2 for 'cake', got 1"),
        ({"kv_lookahead": -1}, "invalid", "a whole number of at least 0 tokens"),
        ({"kv_lookahead": True}, "invalid", "got True"),
        ({"kv_lookahead": "8"}, "invalid", "got '8'"),
        ({"kv_lookahead": 8, "kv_compress": "off"}, "invalid", "kv_lookahead=8 needs a method"),
        ({"kv_lookahed": 8}, "invalid", "did you mean 'kv_lookahead'"),
    ],
)
def test_what_requests_may_not_choose(asked, kind, says):
    with pytest.raises(OverrideError, match=says.replace("'", ".")) as caught:
        settings_for(ENGINE, asked)
    assert caught.value.reason == kind
