"""Compression settings of requests, and the errors of wrong ones."""

import math
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_kvcompress.errors import ConfigError, OverrideError, shorten
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import override_args
from vllm_kvcompress.settings.request_keys import REQUEST_KEYS
from vllm_kvcompress.settings.request_options import RequestOptions

OPEN = CompressionConfig.parse(
    {"compress": "cake", "budget": 0.2, "min_prompt": 300, "pressure": 0.4, "min_output": 9}
    | {"allow_override": "all", "log_requests": True, "model": "m"}
)
BOUNDED = CompressionConfig.parse(
    {"compress": "cake", "allow_override": "off,snapkv", "budget_bounds": "0.05:0.5,128:1024"}
)
OPT_IN = CompressionConfig.parse({"compress": "off", "allow_override": "all", "budget": 0.3})


def request_settings(engine, extra_args):
    return RequestOptions.parse(engine, extra_args).settings


def refusal(engine, **extra_args):
    with pytest.raises(OverrideError) as caught:
        request_settings(engine, extra_args)
    assert "\n" not in str(caught.value)
    return caught.value.reason, str(caught.value)


OF_OTHERS = {"other": 3, "compressor": 1, "kvcompress_options": {"spans": [[0, 3]]}}


@pytest.mark.parametrize("engine", [OPEN, BOUNDED])
@pytest.mark.parametrize("extra_args", [None, {}, OF_OTHERS, {"kv_transfer_params": {}}])
def test_requests_without_choices_get_the_engines_settings(engine, extra_args):
    assert request_settings(engine, extra_args) is engine


def test_opt_in_compresses_only_requests_that_choose_a_method():
    assert request_settings(OPT_IN, None) is None
    assert request_settings(OPT_IN, {"kv_compress": "off"}) is None
    chosen = request_settings(OPT_IN, {"kv_compress": "tova"})
    assert (chosen.compress, chosen.budget) == ("tova", 0.3)
    assert request_settings(OPT_IN, {"kv_compress": "tova", "kv_budget": 64}).budget == 64
    assert refusal(OPT_IN, kv_budget=0.2)[0] == "invalid"


NAMED = {"half": "snapkv:0.5", "few": "tova:200", "full": "off"}


@pytest.mark.parametrize("compress", ["cake", "off"])
@pytest.mark.parametrize("changes", [{}, {"allow_override": "off", "budget_bounds": "0.1:0.2"}])
def test_an_alias_needs_no_override_permission(compress, changes):
    engine = CompressionConfig.parse(
        {"compress": compress, "alias": NAMED, "min_prompt": 7, **changes}
    )
    half, few = (request_settings(engine, {"kv_alias": name}) for name in ("half", "few"))
    assert (half.compress, half.budget, half.min_prompt) == ("snapkv", 0.5, 7)
    assert (few.compress, few.budget) == ("tova", 200)
    assert request_settings(engine, {"kv_alias": "full"}) is None
    reason, message = refusal(engine, kv_alias="third")
    assert (reason, "one of ['few', 'full', 'half']" in message) == ("invalid", True)
    assert refusal(engine, kv_alias=["half"])[0] == "invalid"


def test_a_request_wins_over_its_alias_if_overrides_are_allowed():
    closed = CompressionConfig.parse({"compress": "cake", "alias": NAMED})
    for extra_args in ({"kv_budget": 0.5}, {"kv_compress": "off"}, {"kv_compress": "snapkv"}):
        reason, message = refusal(closed, kv_alias="half", **extra_args)
        assert (reason, "does not let requests choose" in message) == ("not_allowed", True)
    bounded = CompressionConfig.parse(
        {"compress": "off", "alias": NAMED, "allow_override": "h2o", "budget_bounds": "0.1:0.4"}
    )

    def chosen(name, **extra_args):
        found = request_settings(bounded, {"kv_alias": name, **extra_args})
        return found and (found.compress, found.budget)

    assert chosen("half", kv_budget=0.3) == ("snapkv", 0.3)
    assert chosen("half", kv_compress="h2o") == ("h2o", 0.5)
    assert chosen("half", kv_compress="h2o", kv_budget=0.3) == ("h2o", 0.3)
    assert chosen("half", kv_compress="off") is None
    assert chosen("full", kv_compress="h2o", kv_budget=0.3) == ("h2o", 0.3)
    assert refusal(bounded, kv_alias="half", kv_budget=0.5)[0] == "out_of_bounds"
    assert refusal(bounded, kv_alias="half", kv_compress="tova")[0] == "not_allowed"
    reason, message = refusal(bounded, kv_alias="full", kv_budget=0.3)
    assert (reason, "'full' means off" in message) == ("invalid", True)


def test_a_request_chooses_the_format_of_kept_tokens():
    """auto always; k4v3 if the engine's own settings, an allowed method or an alias use it."""
    plain = CompressionConfig.parse({"compress": "cake", "allow_override": "all"})
    assert request_settings(plain, {"kv_packed_dtype": "auto"}).resolved_packed_dtype == "auto"
    reason, message = refusal(plain, kv_packed_dtype="k4v3")
    assert reason == "not_allowed"
    assert "does not pack prompts in k4v3" in message
    assert "ask the operator for --kv-packed-dtype k4v3" in message
    for changes in ({"packed_dtype": "k4v3"}, {"alias": "small=tova:0.4:k4v3"}):
        engine = CompressionConfig.parse({"compress": "cake", "allow_override": "all", **changes})
        for packed_dtype in ("auto", "k4v3"):
            extra_args = {"kv_packed_dtype": packed_dtype, "kv_compress": "snapkv"}
            chosen = request_settings(engine, extra_args)
            assert (chosen.compress, chosen.resolved_packed_dtype) == ("snapkv", packed_dtype)
    one = {"kv_packed_dtype": "k4v3", "kv_budget": 1.0, "kv_lookahead": 0}
    assert request_settings(engine, one).resolved_packed_dtype == "k4v3"


def test_requests_that_may_not_choose_settings_may_not_choose_a_format():
    engine = CompressionConfig.parse({"compress": "cake", "packed_dtype": "k4v3"})
    assert refusal(engine, kv_packed_dtype="auto")[0] == "not_allowed"


@pytest.mark.parametrize("value", ["K4V3", "fp8", "", None, True, 4, ["k4v3"], "k" * 10**6])
def test_a_wrong_format_is_refused(value):
    reason, message = refusal(OPEN, kv_packed_dtype=value)
    assert (reason, message.startswith("kv_packed_dtype must be auto or k4v3")) == ("invalid", True)
    assert len(message) < 200
    assert refusal(OPEN, kv_packed_dtyp="k4v3")[1].endswith("did you mean 'kv_packed_dtype'?")
    assert refusal(OPEN, packed_dtype="k4v3")[1].endswith("did you mean 'kv_packed_dtype'?")
    assert refusal(OPT_IN, kv_packed_dtype="auto")[0] == "invalid"
    assert "needs a method" in refusal(OPEN, kv_compress="off", kv_packed_dtype="auto")[1]


def test_a_requests_format_wins_over_its_aliass_and_that_over_the_engines():
    engine = CompressionConfig.parse(
        {"compress": "cake", "allow_override": "all", "packed_dtype": "k4v3"}
        | {"alias": {"plain": "tova:0.5:auto", "own": "tova:0.5", "full": "off"}}
    )

    def packed_dtype(**extra_args):
        return request_settings(engine, extra_args).resolved_packed_dtype

    assert packed_dtype(kv_budget=0.5) == packed_dtype(kv_alias="own") == "k4v3"
    assert packed_dtype(kv_alias="plain") == packed_dtype(kv_alias="plain", kv_budget=0.9) == "auto"
    assert packed_dtype(kv_alias="plain", kv_packed_dtype="k4v3") == "k4v3"
    assert packed_dtype(kv_alias="own", kv_packed_dtype="auto") == "auto"
    assert refusal(engine, kv_alias="full", kv_packed_dtype="auto")[0] == "invalid"


@pytest.mark.parametrize(
    ("raw", "extra_args"),
    [
        ({"compress": "cake", "alias": NAMED}, {}),
        ({"compress": "off", "alias": {"full": "off", **NAMED}}, {"kv_alias": "half"}),
        ({"compress": "off", "alias": NAMED, "allow_override": "off,h2o"}, {"kv_compress": "h2o"}),
    ],
)
def test_override_args_select_the_first_variant(raw, extra_args):
    engine = CompressionConfig.parse(raw)
    assert override_args(engine) == extra_args
    assert request_settings(engine, extra_args) == engine.variants[0]


def test_a_server_without_compression_refuses_aliases():
    assert refusal(None, kv_alias="half")[0] == "not_allowed"
    assert refusal(CompressionConfig.parse({"compress": "cake"}), kv_alias="half")[0] == "invalid"


def test_a_request_can_choose_off():
    assert request_settings(OPEN, {"kv_compress": "off"}) is None
    assert request_settings(OPEN, {"kv_compress": "off", "kv_budget": 0.1}) is None
    assert request_settings(OPEN, {"kv_compress": False}) is None


def test_another_method_is_its_preset_with_the_engines_limits():
    own = {"compress": "cake", "allocator_params": {"tau1": 3.0}, "window": 16}
    engine = CompressionConfig.parse(
        {**own, "allow_override": ["snapkv"], "min_prompt": 7, "pressure": 0.5, "min_output": 3}
    )
    other = request_settings(engine, {"kv_compress": "snapkv"})
    plain = CompressionConfig.parse({"compress": "snapkv"})
    assert other.parts == plain.parts
    assert other.method.scorer == plain.method.scorer
    assert (other.min_prompt, other.pressure, other.min_output) == (7, 0.5, 3)
    same = request_settings(engine, {"kv_compress": "cake", "kv_budget": 0.7})
    assert same.allocator_params == engine.allocator_params
    assert (same.resolved_window, same.budget) == (16, 0.7)


@pytest.mark.parametrize(
    ("extra_args", "reason", "words"),
    [
        ({"kv_compress": "h2o"}, "not_allowed", "must be one of ['cake', 'off', 'snapkv']"),
        ({"kv_compress": "nonsense"}, "not_allowed", "got 'nonsense'"),
        ({"kv_budget": 0.51}, "out_of_bounds", "between 0.05 and 0.5"),
        ({"kv_budget": 0.049}, "out_of_bounds", "got 0.049"),
        ({"kv_budget": 127}, "out_of_bounds", "between 128 and 1024"),
        ({"kv_budget": 10**30}, "out_of_bounds", "between 128 and 1024"),
        ({"kv_budget": "many"}, "invalid", "kv_budget must be a ratio"),
        ({"kv_budget": math.nan}, "invalid", "kv_budget must be a ratio"),
        ({"kv_budget": -0.1}, "invalid", "got -0.1"),
        ({"kv_budget": True}, "invalid", "kv_budget must be"),
        ({"kv_budget": 1}, "invalid", "write 1.0 to keep every token"),
        ({"kv_budget": [0.2]}, "invalid", "got [0.2]"),
        ({"kv_budget": None}, "invalid", "got None"),
        ({"kv_compress": 3}, "invalid", "kv_compress must be off or the name of a method, got 3"),
        ({"kv_compress": ["cake"]}, "invalid", "got ['cake']"),
        ({"kv_budgets": 0.2}, "invalid", "did you mean 'kv_budget'"),
        ({"kv_compres": "off"}, "invalid", "did you mean 'kv_compress'"),
        ({"KV_BUDGET": 0.2}, "invalid", "did you mean 'kv_budget'"),
        ({"kv-budget": 0.2}, "invalid", "did you mean 'kv_budget'"),
        ({"kv-budget": 0.2}, "invalid", "'kv-budget' is unknown"),
        ({"KV_BUDGET": 0.2}, "invalid", "'KV_BUDGET' is unknown"),
        ({"budget": 0.2}, "invalid", "'budget' is unknown; did you mean 'kv_budget'?"),
        ({"kvbudget": 0.2}, "invalid", "'kvbudget' is unknown; did you mean 'kv_budget'?"),
        ({"kvBudgte": 0.2}, "invalid", "'kvBudgte' is unknown; did you mean 'kv_budget'?"),
        ({"kv.budget": 0.2}, "invalid", "did you mean 'kv_budget'?"),
        ({"compress": "off"}, "invalid", "did you mean 'kv_compress'?"),
        ({"protect": "system"}, "invalid", "did you mean 'kv_protect'?"),
        ({"kvtransferparams": {}}, "invalid", "did you mean 'kv_transfer_params'?"),
        ({"vllm_xargs": {"kv_budget": 0.2}}, "invalid", "but is inside 'vllm_xargs'"),
        ({"a": {"b": {"kv_compress": "off"}}}, "invalid", "'kv_compress' must be a top-level"),
        ({"kv_budget": "0.2_5"}, "invalid", "got '0.2_5'"),
        ({"kv_budget": "\u0662\u0665\u0666"}, "invalid", "kv_budget must be a ratio"),
        ({"kv_window": 8}, "invalid", "a request may set ['kv_compress', 'kv_budget', '"),
        ({"kv_decode_budget": 64}, "not_allowed", "has no decode budget"),
        ({"kv_decode_budgets": 64}, "invalid", "did you mean 'kv_decode_budget'"),
        ({"kv_" + "x" * 10**6: 8}, "invalid", "'kv_xxxxxxxxxxxxxxxxxxxxx' is unknown"),
        ({f"kv_{i}": 8 for i in range(1000)}, "invalid", "'kv_0' is unknown"),
    ],
)
def test_refusals(extra_args, reason, words):
    found, message = refusal(BOUNDED, **extra_args)
    assert found == reason
    assert words in message


GROWING = CompressionConfig.parse(
    {"compress": "cake", "allow_override": "all", "decode_budget": 512, "decode_window": 4}
)


@pytest.mark.parametrize(
    ("extra_args", "reason", "words"),
    [
        ({"kv_decode_budget": 513}, "out_of_bounds", "at most 512 on this server, got 513"),
        ({"kv_decode_budget": 4}, "invalid", "cannot hold the decode window of 4 tokens"),
        ({"kv_decode_budget": True}, "invalid", "whole number of at least 2"),
        ({"kv_decode_budget": 0.5}, "invalid", "got 0.5"),
        ({"kv_decode_budget": None}, "invalid", "got None"),
        ({"kv_decode_budget": "64"}, "invalid", "got '64'"),
        ({"kv_decode_budget": 64, "kv_compress": "off"}, "invalid", "needs a method"),
    ],
)
def test_refused_decode_budgets(extra_args, reason, words):
    found, message = refusal(GROWING, **extra_args)
    assert found == reason
    assert words in message


def test_a_request_can_lower_the_decode_budget():
    for extra_args in (64, 64.0):
        own = request_settings(GROWING, {"kv_decode_budget": extra_args, "kv_compress": "snapkv"})
        assert (own.compress, own.decode.budget, own.decode.window) == ("snapkv", 64, 4)
    assert request_settings(GROWING, {"kv_compress": "snapkv"}).decode.budget == 512
    assert request_settings(GROWING, {"kv_compress": "off"}) is None


def test_budget_bounds_are_inclusive_and_separate_by_kind():
    for budget in (0.05, 0.5, 128, 1024):
        assert request_settings(BOUNDED, {"kv_budget": budget}).budget == budget
    tokens = CompressionConfig.parse(
        {"compress": "cake", "allow_override": "off", "budget_bounds": "128:1024"}
    )
    reason, message = refusal(tokens, kv_budget=0.2)
    assert (reason, "must be a whole number of tokens" in message) == ("out_of_bounds", True)


def test_a_budget_below_the_window_is_refused():
    reason, message = refusal(OPEN, kv_budget=20)
    assert (reason, "window of 32" in message) == ("invalid", True)
    assert request_settings(OPEN, {"kv_compress": "tova", "kv_budget": 20}).budget == 20


def test_without_override_permission_choices_are_refused():
    closed = CompressionConfig.parse({"compress": "cake"})
    for extra_args in ({"kv_compress": "off"}, {"kv_compress": "cake"}, {"kv_budget": 0.2}):
        reason, message = refusal(closed, **extra_args)
        assert (reason, "--kv-allow-override" in message) == ("not_allowed", True)


def test_without_compression_choices_are_refused():
    assert request_settings(None, {"kv_compress": "off"}) is None
    assert request_settings(None, {"kv_compress": "off", "kv_budget": 0.2}) is None
    assert request_settings(None, {"kv_of_another_plugin": 1}) is None
    assert request_settings(None, {"other": 1}) is None
    for extra_args in ({"kv_compress": "cake"}, {"kv_budget": 0.2}):
        reason, message = refusal(None, **extra_args)
        assert (reason, "runs without" in message) == ("not_allowed", True)


def test_a_ratio_of_one_and_one_token_are_different_budgets():
    """1.0 keeps everything and 1 is one token; a cache must not mix them up."""
    assert request_settings(OPEN, {"kv_budget": 1.0}).budget == 1.0
    assert refusal(OPEN, kv_budget=1)[0] == "invalid"
    kept = request_settings(OPEN, {"kv_compress": "tova", "kv_budget": 2})
    assert type(kept.budget) is int


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
METHOD = st.sampled_from(["off", *PRESETS, "custom", "CAKE", ""]) | JSON
KEYS = st.sampled_from(["kv_compress", "kv_budget", "kv_compres", "kv_", "x", ""])


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    engine=st.sampled_from([OPEN, BOUNDED, OPT_IN, None]),
    extra_args=st.dictionaries(KEYS, JSON)
    | st.fixed_dictionaries(
        {}, optional={"kv_compress": METHOD, "kv_budget": st.floats(0, 2) | st.integers(0, 5000)}
    ),
)
def test_any_choice_is_within_the_policy_or_refused(engine, extra_args):
    refused = None
    try:
        chosen = request_settings(engine, extra_args)
    except OverrideError as e:
        refused = e
    if refused is not None:
        assert "\n" not in str(refused)
        assert refused.reason in ("not_allowed", "out_of_bounds", "invalid")
        return
    if chosen is None:
        assert engine in (None, OPT_IN) or extra_args["kv_compress"] in ("off", False)
        return
    assert chosen.compress in {engine.compress, *engine.allow_override}
    assert (chosen.min_prompt, chosen.pressure) == (engine.min_prompt, engine.pressure)
    if chosen is not engine and engine is BOUNDED and "kv_budget" in extra_args:
        low, high = engine.budget_bounds[type(chosen.budget) is int]
        assert low <= chosen.budget <= high


CONTROL = "\x1b[2J\n\r\x00\u202e\u2028\ud800"
HOSTILE = {
    "long text": "A" * 2_000_000,
    "long digits": "9" * 2_000_000,
    "commas": "system," * 300_000,
    "control characters": CONTROL,
    "long control characters": CONTROL * 100_000,
    "a large number": 10**400,
    "a number that Python does not print": -(10**5000),
    "not a number": math.nan,
    "infinity": math.inf,
    "a wide list": [CONTROL] * 100_000,
    "a long text in a list": ["A" * 2_000_000],
    "a wide object": {f"{CONTROL}{i}": {} for i in range(100_000)},
}
ENGINES = [OPEN, BOUNDED, OPT_IN, GROWING, None]
HOSTILE["a deep list"] = []
for _ in range(5000):
    HOSTILE["a deep list"] = [HOSTILE["a deep list"]]


def refusal_or_nothing(engine, extra_args):
    try:
        request_settings(engine, extra_args)
    except OverrideError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("key", [*REQUEST_KEYS, "kv_nonsense", "KV_BUDGET"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_errors_quote_hostile_values_in_one_short_line(kind, key):
    """They are made in little memory, so that they take little time."""
    for engine in ENGINES:
        tracemalloc.start()
        message = refusal_or_nothing(engine, {key: HOSTILE[kind]})
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert used < 300_000
        assert len(message) < 500
        assert message.isprintable()


@pytest.mark.parametrize("key", ["kv_" + "A" * 10**6, f"kv_{CONTROL}", "kv-budget" + "_" * 10**6])
def test_errors_quote_hostile_keys_in_one_short_line(key):
    for extra_args in ({key: 1}, {"outside": {key: 1}}):
        message = refusal_or_nothing(OPEN, extra_args)
        assert len(message) < 500
        assert message.isprintable()


def test_an_error_cannot_be_long_or_have_control_characters():
    error = OverrideError.invalid(f"got {CONTROL} " + "A" * 10**6)
    assert str(error).isprintable()
    assert len(str(error)) < 3000
    assert "\\x1b[2J\\n" in str(error)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("it's", '"it\'s"'),
        ("a" * 100, "'" + "a" * 58 + "'..."),
        ("a" * 58, "'" + "a" * 58 + "'"),
        ("\n" * 58, "'" + "\\n" * 29 + "'..."),
        ("\u202e", "'\\u202e'"),
        ({"a": [1, 0.5, None, True, {}]}, "{'a': [1, 0.5, None, True, {}]}"),
        ([["a" * 100]], "[['" + "a" * 54 + "..."),
        (b"\n", "b'\\n'"),
    ],
)
def test_values_are_shown_as_python_writes_them_but_shortened(value, shown):
    assert shorten(value) == shown


# -- settings of the operator -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"allow_override": "cakee"}, "did you mean 'cake'"),
        ({"allow_override": ""}, "must be all, or methods"),
        ({"allow_override": 3}, "must be all, or methods"),
        ({"allow_override": "custom"}, "allow_override='custom' is unknown"),
        ({"allow_override": "all", "budget_bounds": "0.5:0.1"}, "must be MIN:MAX"),
        ({"allow_override": "all", "budget_bounds": "0.1:1"}, "must be MIN:MAX"),
        ({"allow_override": "all", "budget_bounds": "0.1"}, "must be MIN:MAX"),
        ({"allow_override": "all", "budget_bounds": "0.1:0.2,0.3:0.4"}, "must be MIN:MAX"),
        ({"allow_override": "all", "budget_bounds": [[0.1, True]]}, "must be MIN:MAX"),
        ({"budget_bounds": "0.1:0.2"}, "--kv-allow-override"),
        ({"budget": 40, "window": 8, "allow_override": "all", "compress": "snapkv"}, None),
        ({"budget": 20, "compress": "tova", "allow_override": "snapkv"}, "window of 32"),
        ({"pressure": 1.1}, "pressure"),
        ({"pressure": True}, "pressure must be a number"),
        ({"min_output": 1}, "min_output"),
    ],
)
def test_override_settings_are_parsed(given, words):
    raw = {"compress": "cake", **given}
    if words is None:
        CompressionConfig.parse(raw)
        return
    with pytest.raises(ConfigError) as caught:
        CompressionConfig.parse(raw)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", [OPEN, BOUNDED, OPT_IN])
def test_settings_survive_additional_config(engine):
    again = CompressionConfig.parse(engine.to_additional_config())
    assert again == engine
    assert again.variants == engine.variants


def test_variants_are_all_settings_that_can_run():
    assert [variant.compress for variant in OPT_IN.variants] == list(PRESETS)
    assert [variant.compress for variant in BOUNDED.variants] == ["cake", "snapkv"]
    assert CompressionConfig.parse({"compress": "off"}).variants == ()
    assert not CompressionConfig.parse({"compress": "off", "allow_override": "off"}).active
    assert OPT_IN.active
    assert not OPT_IN.enabled


def test_only_a_set_interval_packs_outputs_of_requests_in_k4v3():
    """Settings with the default interval are equal to those without, so caches must tell them."""
    raw = {"compress": "cake", "packed_dtype": "k4v3", "allow_override": "snapkv"}
    for config in (raw, raw | {"decode_interval": 128}):
        engine = CompressionConfig.parse(config)
        is_set = "decode_interval" in config
        assert engine.packs_outputs is is_set
        for extra_args in ({"kv_budget": 0.3}, {"kv_compress": "snapkv"}):
            assert request_settings(engine, extra_args).packs_outputs is is_set
            named = request_settings(engine, {**extra_args, "kv_packed_dtype": "k4v3"})
            assert named.packs_outputs is is_set
            plain = request_settings(engine, {**extra_args, "kv_packed_dtype": "auto"})
            assert not plain.packs_outputs
