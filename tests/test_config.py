"""Defaults and budgets; one value in many processes."""

import json
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from settings_as_written import parse, refused
from vllm_kvcompress.config import MAX_WINDOW, CompressionConfig, parse_budget
from vllm_kvcompress.errors import ConfigError, KVCompressError
from vllm_kvcompress.plan import Prompt
from vllm_kvcompress.policies.allocators.cake import Cake
from vllm_kvcompress.policies.allocators.d2o import D2O
from vllm_kvcompress.policies.allocators.dynamickv import DynamicKV
from vllm_kvcompress.policies.allocators.pyramid import Pyramid
from vllm_kvcompress.policies.allocators.uniform import Uniform
from vllm_kvcompress.policies.presets import METHODS, PRESETS
from vllm_kvcompress.policies.scorers.accumulated import H2O
from vllm_kvcompress.policies.scorers.cake import CakeIndicator
from vllm_kvcompress.policies.scorers.caote import Caote, FastCaote
from vllm_kvcompress.policies.scorers.chance import Random
from vllm_kvcompress.policies.scorers.position import StreamingLLM
from vllm_kvcompress.policies.scorers.tova import Tova
from vllm_kvcompress.policies.scorers.window import SnapKV
from vllm_kvcompress.policies.selectors import Chunks, HeavyRecent, TopK

prop = settings(derandomize=True, deadline=None, max_examples=100)
NAN, INF = math.nan, math.inf


# -- defaults ---------------------------------------------------------------------------------


def test_off_by_default():
    config = CompressionConfig.parse({})
    assert config == CompressionConfig()
    assert not config.enabled
    assert ("off", *PRESETS, "custom") == METHODS


@pytest.mark.parametrize(
    ("name", "allocator", "scorer", "window"),
    [
        ("snapkv", Uniform(), SnapKV(pooling="max", kernel=7), 32),
        ("pyramidkv", Pyramid(beta=20.0), SnapKV(pooling="max", kernel=7), 32),
        ("streamingllm", Uniform(), StreamingLLM(sinks=4), 0),
        ("cake", Cake(tau1=1.0, tau2=1.0), CakeIndicator(gamma=200.0, kernel=5), 32),
        ("h2o", Uniform(), H2O(), 32),
        ("tova", Uniform(), Tova(), 1),
        ("dynamickv", DynamicKV(r_max=10.0, every=4), SnapKV(pooling="max", kernel=7), 8),
        ("d2o", D2O(norm="layer_minmax", floor=8), H2O(), 0),
        ("chunkkv", Uniform(), SnapKV(kernel=1), 32),
        ("caote", Uniform(), Caote(base="snapkv", reduce="mean"), 32),
        ("fastcaote", Uniform(), FastCaote(base="snapkv", reduce="mean"), 32),
        ("random", Uniform(), Random(seed=0), 32),
    ],
)
def test_presets(name, allocator, scorer, window):
    """docs/methods.md 0; StreamingLLM's own window is its ranking."""
    config = parse(name)
    assert config.enabled
    assert config.build_allocator() == allocator
    assert config.build_scorer() == scorer
    selectors = {"chunkkv": Chunks(size=10, shared=True, reuse=1), "d2o": HeavyRecent(sinks=4)}
    assert config.build_selector() == selectors.get(name, TopK())
    assert config.parts.merge == (name == "d2o")
    assert config.resolved_window == window
    assert (config.budget, config.min_prompt, config.log_requests) == (0.2, 1024, False)
    assert set(PRESETS) == set(METHODS) - {"off", "custom"}


def test_a_method_of_ones_own():
    raw = {"allocator": "cake", "scorer": "caote", "base": "snapkv", "selector": "chunks"}
    config = CompressionConfig.parse(raw)
    assert config.compress == "custom"
    assert config.build_allocator() == Cake()
    assert config.build_scorer() == Caote(base="snapkv")
    assert config.build_selector() == Chunks()
    assert config.resolved_window == 32
    assert CompressionConfig.parse(config.to_additional_config()) == config
    assert CompressionConfig.parse({"scorer": "tova"}).resolved_window == 1
    assert CompressionConfig.parse({"scorer": "tova", "allocator": "cake"}).resolved_window == 32
    refused("need a method", raw={"selector": "chunks"})


@pytest.mark.parametrize(("base", "window"), [("snapkv", 32), ("tova", 1), ("h2o", 32)])
def test_caotes_window_is_its_bases(base, window):
    assert parse("caote", base=base).resolved_window == window
    assert parse("caote", base=base, window=16).resolved_window == 16
    assert parse("caote", scorer_params={"base": base}).resolved_window == window
    assert parse("snapkv", scorer="caote", base=base).resolved_window == window
    assert CompressionConfig.parse({"scorer": "fastcaote", "base": base}).resolved_window == window


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"compress": "h2o", "base": "tova"}, ("base='tova' is for", "'h2o'", "remove base")),
        ({"compress": "caote", "window": 1, "allocator": "cake"}, ("window to at least 2",)),
        ({"compress": "caote", "base": "tova", "scorer_params": {"base": "h2o"}}, ("twice",)),
        ({"compress": "dynamickv", "scorer": "streamingllm"}, ("ranks by position", "'uniform'")),
        ({"compress": "dynamickv", "scorer": "random"}, ("ranks at random", "'uniform'")),
        ({"compress": "random", "allocator": "global"}, ("'global'", "at random", "'uniform'")),
        ({"allocator": "global", "scorer": "streamingllm"}, ("'global'", "ranks by position")),
        ({"allocator": "global", "allocator_params": {"r_max": 3}}, ("no parameter 'r_max'",)),
        ({"compress": "streamingllm", "selector": "chunks"}, ("ranks by position", "'topk'")),
        ({"compress": "tova", "window": 0}, ("reads the attention of a window",)),
        ({"compress": "chunkkv", "selector_params": {"szie": 3}}, ("did you mean 'size'",)),
        ({"compress": "chunkkv", "selector_params": {"shared": 1}}, ("must be a bool",)),
        ({"compress": "d2o", "allocator_params": {"skip_layers": 3}}, ("must be a tuple",)),
    ],
)
def test_combinations_that_make_no_sense(raw, words):
    refused(*words, raw=raw)


@pytest.mark.parametrize("preset", ["snapkv", "d2o"])
def test_merging_is_no_yes_or_values_alone(preset):
    """None is the preset's own."""
    usual = preset == "d2o"
    meant = {True: True, False: False, "true": True, "false": False, "values": "values"}
    for value, want in {**meant, None: usual}.items():
        config = parse(preset, merge=value)
        found = config.parts.merge
        assert (found, type(found)) == (want, type(want))
        assert CompressionConfig.parse(config.to_additional_config()).parts.merge == want
    assert parse(preset, merge="values") != parse(preset, merge=True)


@pytest.mark.parametrize(
    "value", ["keys", "value", "Values", "", 1, 0, 2, NAN, [True], {}, ["values"]]
)
def test_other_ways_to_merge_are_refused(value):
    refused('merge must be true, "values" to fold', "or false", repr(value), merge=value)


def test_lists_become_parameters():
    config = parse("d2o", allocator_params={"skip_layers": [0, 1, -1]})
    assert config.build_allocator() == D2O(skip_layers=(0, 1, -1))
    assert CompressionConfig.parse(config.to_additional_config()) == config
    hash(config)


@pytest.mark.parametrize(
    ("model", "budget", "tau"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 128, (1.6, 0.6)),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 1024, (1.6, 0.4)),
        ("mistralai/Mistral-7B-Instruct-v0.3", 1024, (0.8, 0.5)),
        ("meta-llama/Llama-2-7b-chat-hf", 128, (0.9, 2.3)),
        ("Qwen/Qwen2.5-7B-Instruct", 1024, (1.5, 0.6)),
        ("meta-llama/Llama-3.1-8B-Instruct", 512, (1.0, 1.0)),
        ("meta-llama/Llama-3.1-8B-Instruct", 0.1, (1.0, 1.0)),
        ("meta-llama/Llama-3.1-70B-Instruct", 128, (1.0, 1.0)),
        ("some/other-model", 128, (1.0, 1.0)),
    ],
)
def test_published_temperatures(model, budget, tau):
    config = parse("cake", model=model, budget=budget)
    assert config.build_allocator() == Cake(tau1=tau[0], tau2=tau[1])
    own = parse("cake", model=model, budget=budget, allocator_params={"tau1": 0.7})
    assert own.build_allocator() == Cake(tau1=0.7, tau2=tau[1])


def test_published_r_max():
    assert parse("dynamickv", model="Qwen/Qwen2-7B-Instruct").build_allocator().r_max == 10.0


def test_a_ratio_is_rounded_once_where_the_method_says_so():
    """docs/methods.md 1.2 and 2.5: ``round(rho * S * N)`` for D2O, a floor per layer for others."""
    assert parse("d2o", budget=0.2).prompt(6, 257).kept == 308
    assert parse("snapkv", budget=0.2).prompt(6, 257).kept == 6 * 51
    assert parse("d2o", budget=51).prompt(6, 257).kept == 6 * 51


def test_replacements():
    config = parse(
        "snapkv",
        allocator="pyramid",
        scorer="cake",
        selector="topk",
        window=8,
        allocator_params={"beta": 10},
        scorer_params={"kernel": 3, "gamma": 1},
    )
    assert config.build_allocator() == Pyramid(beta=10)
    assert config.build_scorer() == CakeIndicator(gamma=1, kernel=3)
    assert config.resolved_window == 8


# -- budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.1, 0.1),
        ("0.1", 0.1),
        (1.0, 1.0),
        ("1.0", 1.0),
        (1e-5, 1e-5),
        ("1e-5", 1e-5),
        (1024, 1024),
        ("1024", 1024),
    ],
)
def test_budget(value, expected):
    for got in (parse_budget(value), parse(budget=value).budget):
        assert got == expected
        assert type(got) is type(expected)


BAD_BUDGETS = [
    0, -1, 1.5, "ten", NAN, True, INF, False, None, 0.0, -0.1, -INF, "0", "-1", "1.5", "nan", "inf",
    "", "True", "10%", [0.1], {"ratio": 0.1}, 1j, 1.0000001,
]  # fmt: skip


@pytest.mark.parametrize("value", BAD_BUDGETS, ids=repr)
def test_budget_is_refused(value):
    rule = "budget must be a ratio in (0, 1] such as 0.1, or a whole number of tokens per layer"
    refused(rule, repr(value), budget=value)
    with pytest.raises(ConfigError):
        parse_budget(value)


@pytest.mark.parametrize("budget", [1, 31, 32])
def test_budget_must_exceed_the_window(budget):
    refused(f"budget={budget}", "window of 32", "above 32", budget=budget)
    assert parse(budget=33).budget == 33
    assert parse(budget=3, window=2).budget == 3


def test_budget_of_one_hints_at_one_point_zero():
    assert "write 1.0" in refused(budget=1)
    assert "1.0" not in refused(budget=2)
    assert parse("streamingllm", budget=1).budget == 1


@pytest.mark.parametrize(
    ("budget", "tokens", "expected"),
    [
        (0.1, 6000, 600),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.07, 700, 49),
        (1.0, 777, 777),
        (0.2, 1029, 205),
        (1e-5, 200_000, 2),
        (0.1, 9, 1),
        ("0.1", 6000, 600),
        (50, 6000, 50),
        (50, 10, 50),
    ],
)
def test_tokens_per_layer(budget, tokens, expected):
    assert parse("streamingllm", budget=budget).tokens_per_layer(tokens) == expected


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
    assert parse(budget=0.1).prompt(24, 6000) == Prompt(
        num_layers=24, tokens=6000, window=32, budget=600
    )
    assert parse(budget=0.1).prompt(24, 100).budget == 33


# -- one value, many processes ----------------------------------------------------------------

FULL = {
    "compress": "snapkv",
    "budget": 0.15,
    "window": 16,
    "min_prompt": 0,
    "min_output": 5,
    "pressure": 0.5,
    "allow_override": ["off", "tova"],
    "budget_bounds": [[0.05, 0.5], [64, 512]],
    "alias": {"llama@kv0.2": "cake:0.2", "a=b:c": "tova:64", "llama@full": "off"},
    "usage": True,
    "allocator": "cake",
    "scorer": "caote",
    "base": "tova",
    "selector": "chunks",
    "merge": True,
    "model": "meta-llama/Llama-3.1-8B",
    "selector_params": {"size": 20, "shared": False},
    "allocator_params": {"tau1": 1.6, "tau2": 0.4},
    "scorer_params": {"kernel": 3, "reduce": "l2"},
    "log_requests": True,
}


@pytest.mark.parametrize(
    "raw",
    [
        {},
        *({"compress": name} for name in METHODS),
        {"compress": "cake", "budget": 1024},
        {"compress": "cake", "budget": 1.0},
        {"compress": "cake", "budget": "0.3", "window": "8"},
        {"compress": "cake", "budget": 0.2, "window": 32, "min_prompt": 1024},
        {"compress": "snapkv", "scorer_params": {"pooling": "avg", "kernel": 5}},
        {"compress": "snapkv", "merge": "values"},
        {"compress": "off", "budget": 0.3},
        FULL,
    ],
    ids=str,
)
def test_equal_after_json_and_pickle(raw):
    config = CompressionConfig.parse(raw)
    plain = config.to_additional_config()
    from_json = CompressionConfig.parse(json.loads(json.dumps(plain, allow_nan=False)))
    for other in (from_json, pickle.loads(pickle.dumps(config)), CompressionConfig.parse(raw)):
        assert other == config
        assert hash(other) == hash(config)
        assert other.budget == config.budget
        assert type(other.budget) is type(config.budget)
        assert other.to_additional_config() == plain
    assert CompressionConfig.parse(config) is config


def test_every_field_reaches_additional_config():
    assert CompressionConfig.parse(FULL).to_additional_config() == FULL
    assert set(FULL) == set(CompressionConfig.model_fields)
    assert CompressionConfig().to_additional_config() == {"compress": "off"}


def test_order_of_parameters_is_no_difference():
    one = parse(scorer_params={"gamma": 1.0, "kernel": 3})
    two = parse(scorer_params={"kernel": 3, "gamma": 1.0})
    assert one == two
    assert hash(one) == hash(two)
    assert one != parse(scorer_params={"kernel": 5, "gamma": 1.0})


def test_frozen():
    with pytest.raises(Exception, match="frozen"):
        parse().budget = 0.5


def test_input_is_left_alone():
    raw = {"compress": "cake", "scorer_params": {"kernel": 3}}
    CompressionConfig.parse(raw)
    assert raw == {"compress": "cake", "scorer_params": {"kernel": 3}}


def test_errors_are_value_errors_of_ours():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, KVCompressError)


def test_settings_without_a_method_are_not_silently_off():
    with pytest.raises(
        ConfigError, match=r"need a method, got only \['budget'\]; add --kv-compress"
    ):
        CompressionConfig.parse({"budget": 0.1})
    assert not CompressionConfig.parse({}).enabled


def test_the_off_of_yaml_is_off():
    assert CompressionConfig.parse({"compress": False}) == CompressionConfig()
    with pytest.raises(ConfigError, match="compress='True' is unknown"):
        CompressionConfig.parse({"compress": True})
