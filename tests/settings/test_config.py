"""Defaults, budgets and serialization of the settings."""

import copy
import json
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from settings_as_written import parse, refused
from vllm_kvcompress.errors import ConfigError, KVCompressError
from vllm_kvcompress.methods.budget_spec import BudgetSpec
from vllm_kvcompress.methods.registry import METHODS, PRESETS
from vllm_kvcompress.settings.config import KEYS, MAX_WINDOW, CompressionConfig
from vllm_kvcompress.settings.parsing import parse_budget

prop = settings(derandomize=True, deadline=None, max_examples=100)
NAN, INF = math.nan, math.inf


# -- defaults ---------------------------------------------------------------------------------


def test_off_by_default():
    config = CompressionConfig.parse({})
    assert config == CompressionConfig()
    assert not config.enabled
    assert ("off", *PRESETS, "custom") == METHODS


# -- budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize("expected", [0.1, 1.0, 1e-5, 1024])
def test_budget(expected):
    for value in (expected, str(expected)):
        for got in (parse_budget(value), parse(budget=value).budget):
            assert got == expected
            assert type(got) is type(expected)


BAD_BUDGETS = [
    0, -1, 1.5, "ten", NAN, True, INF, False, None, 0.0, -0.1, -INF, "0", "-1", "1.5", "nan", "inf",
    "", "True", "10%", [0.1], {"ratio": 0.1}, 1j, 1.0000001,
    "1_000", "0.2_5", "1e-1_0", "\u0660.\u0662", "\u0661\u0660\u0662\u0664", "\uff10.\uff12",
]  # fmt: skip


@pytest.mark.parametrize("value", BAD_BUDGETS, ids=repr)
def test_budget_is_refused(value):
    rule = "budget must be a ratio in (0, 1] such as 0.1, or a whole number of tokens per layer"
    refused(rule, repr(value), budget=value)
    with pytest.raises(ConfigError):
        parse_budget(value)


COUNTS = ["window", "min_prompt", "min_output", "pressure", "lookahead", "park"]
COUNTS += ["decode_budget", "decode_interval", "decode_window"]
COUNTS += ["max_whole", "piece", "probe", "probe_first"]


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("text", ["1_0", "0_1", "\u0661\u0660", "\uff11\uff10"])
def test_numbers_need_the_digits_0_to_9(name, text):
    refused(f"{name} must be written with the digits 0 to 9", repr(text), raw={
        "compress": "cake", name: text,
    })  # fmt: skip


@pytest.mark.parametrize(
    "value", [0, -1, "0", "-0.5", "nan", "inf", True, "16GB", [16], ""], ids=repr
)
def test_park_is_a_number_of_gib(value):
    refused("park must be a number of GiB above 0", "or remove it", repr(value), park=value)
    assert [parse(park=each).park for each in (2, "0.5", "none", None)] == [2.0, 0.5, None, None]
    assert parse(park=2, allow_override="all").variant("snapkv").park is None


@pytest.mark.parametrize("text", ["1_000", "\u0661\u0660\u0662\u0664:2048", "0.1:0.5,1_28:1024"])
def test_bounds_and_aliases_need_the_digits_0_to_9(text):
    refused("budget_bounds must be MIN:MAX", allow_override="all", budget_bounds=text)
    refused("alias 'a': budget must be", alias="a=cake:1_024")
    refused("alias 'a': budget must be", alias={"a": "cake:\u0660.\u0662"})


@pytest.mark.parametrize("budget", [1, 31, 32])
def test_budget_must_exceed_the_window(budget):
    refused(f"budget={budget}", "window of 32", "above 32", budget=budget)
    assert parse(budget=33).budget == 33
    assert parse(budget=3, window=2).budget == 3


def test_budget_of_one_hints_at_one_point_zero():
    assert "write 1.0" in refused(budget=1)
    assert "1.0" not in refused(budget=2)
    assert parse("streamingllm", budget=1).budget == 1


@pytest.mark.parametrize(("budget", "expected"), [("0.1", 600), (50, 50), (7000, 7000)])
def test_tokens_per_layer(budget, expected):
    assert parse("streamingllm", budget=budget).tokens_per_layer(6000) == expected


@prop
@given(st.integers(1, 10**4), st.integers(1, 2 * 10**6), st.integers(2, MAX_WINDOW))
def test_ratio_is_exact_as_written(parts, tokens, window):
    ratio = parts / 10**4
    got = parse(budget=ratio, window=window).tokens_per_layer(tokens)
    assert got == max(parts * tokens // 10**4, window + 1)


@prop
@given(st.floats(0, 1, exclude_min=True), st.integers(1, 10**6))
def test_ratio_floor(ratio, tokens):
    got = parse("streamingllm", budget=ratio).tokens_per_layer(tokens)
    assert got == max(math.floor(Fraction(str(float(ratio))) * tokens), 1)


def test_numpy_ratio():
    config = parse(budget=np.float64(0.1))
    assert config.tokens_per_layer(6000) == 600
    assert CompressionConfig.parse(json.loads(json.dumps(config.to_additional_config()))) == config


def test_prompt():
    assert parse(budget=0.1).budget_spec(24, 6000) == BudgetSpec(
        num_layers=24, tokens=6000, window=32, budget=600
    )
    assert parse(budget=0.1).budget_spec(24, 100).budget == 33


# -- format of kept tokens --------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_packs_in_the_caches_dtype(name):
    assert parse(name).resolved_packed_dtype == parse(name, packed_dtype=None).resolved_packed_dtype
    assert parse(name).resolved_packed_dtype == "auto"
    assert parse(name, packed_dtype="k4v3").resolved_packed_dtype == "k4v3"


@pytest.mark.parametrize(
    ("value", "hint"), [("k4v4", "did you mean 'k4v3'?"), ("fp8", "['auto', 'k4v3']"), (True, "")]
)
def test_an_unknown_format_is_refused(value, hint):
    refused(f"packed_dtype={str(value)!r} is unknown", hint, packed_dtype=value)


@pytest.mark.parametrize(
    ("other", "flag"),
    [({"decode_budget": 512}, "--kv-decode-budget 512"), ({"max_whole": 4096}, "--kv-max-whole")],
)
def test_k4v3_cannot_be_packed_more_than_once(other, flag):
    assert parse(packed_dtype="auto", **other).resolved_packed_dtype == "auto"
    refused("packed_dtype=k4v3", flag, "set packed_dtype to auto", packed_dtype="k4v3", **other)
    refused("alias 'a': packed_dtype=k4v3", flag, alias="a=tova:0.5:k4v3", **other)
    raw = {"compress": "off", "allow_override": "cake", "packed_dtype": "k4v3", **other}
    refused("allow_override='cake': packed_dtype=k4v3", flag, raw=raw)


def test_an_engine_packs_k4v3_if_some_request_can_be_packed_in_it():
    assert not parse(allow_override="all", alias="a=cake:0.2").packs_k4v3
    assert parse(packed_dtype="k4v3").packs_k4v3
    assert parse("off", packed_dtype="k4v3", allow_override="off,cake").packs_k4v3
    assert not parse("off", packed_dtype="k4v3", allow_override="off").packs_k4v3
    assert parse("off", alias="a=cake:0.2:k4v3").packs_k4v3
    assert not parse("off", packed_dtype="k4v3", alias="a=cake:0.2:auto").packs_k4v3


def test_an_interval_without_a_decode_budget_applies_to_k4v3_only():
    config = parse(
        packed_dtype="k4v3", decode_interval=256, allow_override="all", alias="a=tova:64:auto"
    )
    assert all(v.packs_outputs for v in (config, config.variant("snapkv"), config.variant("h2o")))
    plain = config.variant("snapkv", packed_dtype="auto"), config.alias_settings(config.alias[0])
    assert not any(variant.packs_outputs for variant in plain)
    bounded = parse(decode_budget=512, decode_interval=256).variant("tova")
    assert (bounded.decode.budget, bounded.decode.interval) == (512, 256)


def test_another_method_keeps_the_engines_format():
    config = parse(packed_dtype="k4v3", allow_override="all")
    assert config.variant("snapkv").resolved_packed_dtype == "k4v3"
    assert config.variant("snapkv", packed_dtype="auto").resolved_packed_dtype == "auto"
    assert config.variant(packed_dtype="auto").resolved_packed_dtype == "auto"


# -- serialization ----------------------------------------------------------------------------

FULL = {"compress": "snapkv", "budget": 0.15, "window": 16, "min_prompt": 0, "min_output": 5}
FULL |= {"protect": ["system", "question"], "lookahead": 8, "pressure": 0.5, "park": 0.5}
FULL |= {"packed_dtype": "auto", "reuse": "off", "merge": True, "model": "meta-llama/Llama-3.1-8B"}
FULL |= {"allow_override": ["off", "tova"], "budget_bounds": [[0.05, 0.5], [64, 512]]}
FULL |= {"alias": {"llama@kv0.2": "cake:0.2:auto", "a=b:c": "tova:64", "llama@full": "off"}}
FULL |= {"allocator": "cake", "allocator_params": {"tau1": 1.6, "tau2": 0.4}}
FULL |= {"scorer": "caote", "scorer_params": {"base": "tova", "kernel": 3, "reduce": "l2"}}
FULL |= {"selector": "chunks", "selector_params": {"size": 20, "shared": False}}
FULL |= {"usage": True, "log_requests": True, "max_whole": 8192, "piece": 2048}
FULL |= {"decode_budget": 512, "decode_interval": 64, "decode_window": 4}
FULL |= {"probe": 48, "probe_first": 24}


def test_the_method_is_built_once_and_neither_copied_nor_pickled():
    raw = {"compress": "h2o", "max_whole": 2048, "decode_budget": 512}
    config = CompressionConfig.parse(raw)
    size, first_hash = len(pickle.dumps(config)), hash(config)
    assert config.method is config.method
    assert config.method.sums_output_attention
    assert (len(pickle.dumps(config)), hash(config)) == (size, first_hash)
    unpickled = pickle.loads(pickle.dumps(config))
    assert not vars(unpickled).keys() & {"parts", "method"}
    assert unpickled == config == CompressionConfig.parse(raw)
    unbounded = config.with_values(decode_budget=None, max_whole=None)
    assert not vars(unbounded).keys() & {"parts", "method"}
    assert not unbounded.method.compresses_repeatedly


ONE_VALUE = {
    "compress": ["cake", "snapkv", "h2o", "streamingllm", "cake-chunk", "custom", "off"],
    "budget": [0.2, "0.3", 1.0, 64, 1024],
    "packed_dtype": [None, "auto", "k4v3"],
    "reuse": ["off", "late", "grid"],
    "window": [None, "4", 32],
    "lookahead": [None, 0, 8, 32],
    "lookahead_slots": [None, 1, 4],
    "protect": ["none", "system", "tools,question"],
    "min_prompt": [0, 64, 1024],
    "min_output": [2, 5],
    "pressure": [0, 0.5],
    "decode_budget": [None, "none", 64, 512],
    "decode_interval": [16, 128, 256],
    "decode_window": [None, 2, 8],
    "max_whole": [None, "none", 1024, 8192],
    "piece": [1024, 4096],
    "probe": [0, 32, 64],
    "probe_first": [0, 16],
    "park": [None, "none", 0.5, 16],
    "allow_override": ["all", "off", "off,snapkv", []],
    "budget_bounds": [[], "0.1:0.5", "0.1:0.5,64:128"],
    "alias": [{}, {"a": "cake:0.2"}, "b=snapkv:64:auto"],
    "usage": [True, False],
    "allocator": [None, "uniform", "cake"],
    "scorer": [None, "snapkv", "tova"],
    "selector": [None, "topk", "chunks"],
    "allocator_params": [{}],
    "scorer_params": [{}, {"kernel": 5}],
    "selector_params": [{}, {"size": 20}],
    "merge": [None, True, "values", False],
    "log_requests": [True, False],
    "model": [None, "llama"],
}
FEW_KEYS = st.sets(st.sampled_from([*ONE_VALUE]), max_size=8).flatmap(
    lambda keys: st.fixed_dictionaries({key: st.sampled_from(ONE_VALUE[key]) for key in keys})
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.sampled_from(ONE_VALUE["compress"]), FEW_KEYS)
def test_a_configuration_keeps_its_values_and_set_keys(method, written):
    assert ONE_VALUE.keys() == KEYS.keys()
    written = {"compress": method, **written}
    try:
        config = CompressionConfig.parse(written)
    except ConfigError:
        assume(False)
    assert config.given_keys == written.keys()
    assert CompressionConfig.parse(config) is config
    plain = config.to_additional_config()
    sent = json.loads(json.dumps(plain, allow_nan=False))
    copies = [CompressionConfig.parse(sent), CompressionConfig.parse(written)]
    copies += [pickle.loads(pickle.dumps(config)), copy.deepcopy(config), config.with_values()]
    for other in copies:
        assert other == config
        assert hash(other) == hash(config)
        assert other.given_keys == config.given_keys
        assert type(other.budget) is type(config.budget)
        assert other.to_additional_config() == plain
    same_method = config.variant()
    for key in KEYS:
        assert config.with_values(**{key: config.value(key)}) == config
        if key in same_method.given_keys:
            assert same_method.value(key) == config.value(key), key


@pytest.mark.parametrize("raw", [*({"compress": name} for name in METHODS), FULL], ids=str)
def test_equal_after_json_and_pickle(raw):
    config = CompressionConfig.parse(raw)
    plain = config.to_additional_config()
    from_json = CompressionConfig.parse(json.loads(json.dumps(plain, allow_nan=False)))
    for other in (from_json, pickle.loads(pickle.dumps(config))):
        assert (other, hash(other)) == (config, hash(config))


def test_every_field_reaches_additional_config():
    assert CompressionConfig.parse(FULL).to_additional_config() == FULL
    # lookahead_slots cannot be combined with a decode budget
    assert {*FULL, "lookahead_slots"} == set(KEYS)
    slots = {"compress": "cake", "lookahead": 8, "lookahead_slots": 3}
    assert CompressionConfig.parse(slots).to_additional_config() == slots
    assert CompressionConfig().to_additional_config() == {"compress": "off"}


def test_order_of_parameters_does_not_matter():
    one = parse(scorer_params={"gamma": 1.0, "kernel": 3})
    two = parse(scorer_params={"kernel": 3, "gamma": 1.0})
    assert one == two
    assert hash(one) == hash(two)
    assert one != parse(scorer_params={"kernel": 5, "gamma": 1.0})


def test_frozen():
    with pytest.raises(Exception, match="frozen"):
        parse().budget = 0.5


def test_parse_does_not_change_its_input():
    raw = {"compress": "cake", "scorer_params": {"kernel": 3}}
    CompressionConfig.parse(raw)
    assert raw == {"compress": "cake", "scorer_params": {"kernel": 3}}


def test_config_errors_are_value_errors():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, KVCompressError)


def test_settings_without_a_method_are_refused():
    with pytest.raises(
        ConfigError, match=r"need a method, got only \['budget'\]; add --kv-compress"
    ):
        CompressionConfig.parse({"budget": 0.1})
    assert not CompressionConfig.parse({}).enabled


def test_a_yaml_off_is_off():
    assert CompressionConfig.parse({"compress": False}) == CompressionConfig()
    with pytest.raises(ConfigError, match="compress='True' is unknown"):
        CompressionConfig.parse({"compress": True})
