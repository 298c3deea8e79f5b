"""Parts of presets and custom methods, and which parts can be combined."""

import math

import pytest

from settings_as_written import parse, refused
from vllm_kvcompress.methods.parts.allocators import Uniform
from vllm_kvcompress.methods.parts.topk import TopK
from vllm_kvcompress.methods.preset import Preset
from vllm_kvcompress.methods.published.cake import Cake, CakeIndicator
from vllm_kvcompress.methods.published.caote import Caote, FastCaote
from vllm_kvcompress.methods.published.chunkkv import Chunks
from vllm_kvcompress.methods.published.d2o import D2O, HeavyRecent
from vllm_kvcompress.methods.published.defensivekv import Global
from vllm_kvcompress.methods.published.dynamickv import DynamicKV
from vllm_kvcompress.methods.published.h2o import H2O
from vllm_kvcompress.methods.published.keydiff import KeyDiff
from vllm_kvcompress.methods.published.lagkv import LagKV
from vllm_kvcompress.methods.published.pyramidkv import Pyramid
from vllm_kvcompress.methods.published.random import Random
from vllm_kvcompress.methods.published.snapkv import SnapKV
from vllm_kvcompress.methods.published.streamingllm import StreamingLLM
from vllm_kvcompress.methods.published.tova import Tova
from vllm_kvcompress.methods.registry import METHODS, PRESETS
from vllm_kvcompress.settings.config import CompressionConfig


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
        ("defensivekv", Uniform(), SnapKV(aggregate="defensive", value_norm=True), 32),
        ("layer-defensivekv", Global(), SnapKV(aggregate="defensive", value_norm=True), 32),
        ("keydiff", Uniform(), KeyDiff(), 32),
        ("lagkv", Uniform(), LagKV(sinks=4, lag=128), 32),
        ("cake-chunk", Cake(), SnapKV(aggregate="max", pooling="max", kernel=7), 16),
        ("random", Uniform(), Random(seed=0), 32),
    ],
)
def test_presets(name, allocator, scorer, window):
    """docs/methods.md 0; StreamingLLM's window follows from its ranking."""
    config = parse(name)
    assert config.enabled
    assert config.method.allocator == allocator
    assert config.method.scorer == scorer
    selectors = {name: Chunks(size=n) for name, n in (("chunkkv", 10), ("cake-chunk", 20))}
    selectors["d2o"] = HeavyRecent(sinks=4)
    assert config.method.selector == selectors.get(name, TopK())
    assert config.parts.merge == (name == "d2o")
    assert config.resolved_window == window
    assert (config.budget, config.min_prompt, config.log_requests) == (0.2, 1024, False)
    assert set(PRESETS) == set(METHODS) - {"off", "custom"}


def test_a_custom_method():
    raw = {"allocator": "cake", "scorer": "caote", "scorer_params": {"base": "snapkv"}}
    raw["selector"] = "chunks"
    config = CompressionConfig.parse(raw)
    assert config.compress == "custom"
    assert config.method.allocator == Cake()
    assert config.method.scorer == Caote(base="snapkv")
    assert config.method.selector == Chunks()
    assert config.resolved_window == 32
    assert CompressionConfig.parse(config.to_additional_config()) == config
    assert CompressionConfig.parse({"scorer": "tova"}).resolved_window == 1
    assert CompressionConfig.parse({"scorer": "tova", "allocator": "cake"}).resolved_window == 32
    refused("need a method", raw={"selector": "chunks"})


def test_preset_parameters_apply_only_to_the_presets_parts(monkeypatch):
    """Explicit parameters win; another scorer or selector has its own defaults."""
    params = {"scorer": (("kernel", 3),), "selector": (("reuse", 2), ("size", 5))}
    params = {f"{role}_params": values for role, values in params.items()}
    preset = Preset(allocator="uniform", scorer="snapkv", window=8, selector="chunks", **params)
    monkeypatch.setitem(PRESETS, "chunkkv", preset)
    config = parse("chunkkv", selector_params={"size": 20})
    assert config.method.selector == Chunks(size=20, reuse=2)
    assert config.method.scorer == SnapKV(kernel=3)
    assert parse("chunkkv", scorer_params={"kernel": 5}).method.selector == Chunks(size=5, reuse=2)
    assert parse("chunkkv", selector="topk").method.selector == TopK()
    assert parse("chunkkv", scorer="cake").method.scorer == CakeIndicator()


@pytest.mark.parametrize(("base", "window"), [("snapkv", 32), ("tova", 1), ("h2o", 32)])
def test_caote_uses_the_window_of_its_base(base, window):
    of_base = {"scorer_params": {"base": base}}
    assert parse("caote", **of_base).resolved_window == window
    assert parse("caote", **of_base, window=16).resolved_window == 16
    assert parse("snapkv", scorer="caote", **of_base).resolved_window == window
    assert CompressionConfig.parse({"scorer": "fastcaote", **of_base}).resolved_window == window


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"compress": "caote", "window": 1, "allocator": "cake"}, ("window to at least 2",)),
        ({"compress": "dynamickv", "scorer": "streamingllm"}, ("ranks by position", "'uniform'")),
        ({"compress": "dynamickv", "scorer": "random"}, ("ranks at random", "'uniform'")),
        ({"compress": "random", "allocator": "global"}, ("'global'", "at random", "'uniform'")),
        ({"compress": "lagkv", "allocator": "global"}, ("within partitions", "'uniform'")),
        ({"compress": "dynamickv", "scorer": "lagkv"}, ("'dynamickv'", "within partitions")),
        ({"compress": "keydiff", "allocator": "global"}, ("below 0", "allocator 'dynamickv'")),
        ({"allocator": "global", "scorer": "streamingllm"}, ("'global'", "ranks by position")),
        ({"allocator": "global", "allocator_params": {"r_max": 3}}, ("no parameter 'r_max'",)),
        ({"compress": "streamingllm", "selector": "chunks"}, ("ranks by position", "'topk'")),
        ({"compress": "chunkkv", "scorer": "lagkv"}, ("within partitions", "'topk'")),
        ({"compress": "tova", "window": 0}, ("at least 1 for 'tova', got 0", "the attention")),
        ({"compress": "chunkkv", "selector_params": {"szie": 3}}, ("did you mean 'size'",)),
        ({"compress": "chunkkv", "selector_params": {"shared": 1}}, ("must be a bool",)),
        ({"compress": "d2o", "allocator_params": {"skip_layers": 3}}, ("must be a tuple",)),
    ],
)
def test_meaningless_combinations_are_refused(raw, words):
    refused(*words, raw=raw)


@pytest.mark.parametrize("preset", ["snapkv", "d2o"])
def test_merge_values_are_parsed(preset):
    """None is the preset's value."""
    default = preset == "d2o"
    meant = {True: True, False: False, "true": True, "false": False, "values": "values"}
    for value, expected in {**meant, None: default}.items():
        config = parse(preset, merge=value)
        found = config.parts.merge
        assert (found, type(found)) == (expected, type(expected))
        assert CompressionConfig.parse(config.to_additional_config()).parts.merge == expected
    assert parse(preset, merge="values") != parse(preset, merge=True)


@pytest.mark.parametrize(
    "value", ["keys", "value", "Values", "", 1, 0, 2, math.nan, [True], {}, ["values"]]
)
def test_other_merge_values_are_refused(value):
    refused('merge must be true, "values" to merge', "or false", repr(value), merge=value)


def test_scorers_without_queries_work_with_allocators_that_read_them():
    """CAKE reads the window itself, and key cosines have the same scale in all layers."""
    for scorer in ("keydiff", "lagkv"):
        assert parse("cake", scorer=scorer).resolved_window == 32
        assert parse(scorer, window=0).resolved_window == 0
    assert parse("keydiff", selector="chunks").method.selector == Chunks()
    assert parse("keydiff", allocator="dynamickv").method.allocator == DynamicKV()


def test_lists_become_parameters():
    config = parse("d2o", allocator_params={"skip_layers": [0, 1, -1]})
    assert config.method.allocator == D2O(skip_layers=(0, 1, -1))
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
    assert config.method.allocator == Cake(tau1=tau[0], tau2=tau[1])
    preset_params = parse("cake", model=model, budget=budget, allocator_params={"tau1": 0.7})
    assert preset_params.method.allocator == Cake(tau1=0.7, tau2=tau[1])


def test_published_r_max():
    assert parse("dynamickv", model="Qwen/Qwen2-7B-Instruct").method.allocator.r_max == 10.0


def test_d2o_rounds_the_ratio_once():
    """docs/methods.md 1.2 and 2.5: ``round(rho * S * N)`` for D2O, a floor per layer for others."""
    assert parse("d2o", budget=0.2).budget_spec(6, 257).kept == 308
    assert parse("snapkv", budget=0.2).budget_spec(6, 257).kept == 6 * 51
    assert parse("d2o", budget=51).budget_spec(6, 257).kept == 6 * 51


def test_replacements():
    parts = {"allocator": "pyramid", "scorer": "cake", "selector": "topk", "window": 8}
    params = {"allocator_params": {"beta": 10}, "scorer_params": {"kernel": 3, "gamma": 1}}
    config = parse("snapkv", **parts, **params)
    assert config.method.allocator == Pyramid(beta=10)
    assert config.method.scorer == CakeIndicator(gamma=1, kernel=3)
    assert config.resolved_window == 8


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"allocator_params": {"tau1": 1e-300}}, "tau1 must be 0, or between 1e-06 and 1e+06"),
        ({"allocator_params": {"tau1": 1e-6}}, "cake.tau1 must be between 0.05 and 20, got 1e-06"),
        ({"allocator_params": {"tau2": 1e300}}, "got 1e+300; the default is 1.0"),
        ({"allocator_params": {"tau1": 10**400}}, "tau1 must be 0, or between"),
        ({"scorer_params": {"gamma": 1e-40}}, "got 1e-40; the default is 200.0"),
        ({"scorer_params": {"gamma": 1e39}}, "gamma must be 0, or between"),
        ({"scorer_params": {"kernel": 100001}}, "kernel must be at most 4096, got 100001"),
        ({"scorer_params": {"kernel": 2001}}, "cake.kernel must be at most 1023, got 2001"),
        ({"compress": "snapkv", "scorer_params": {"kernel": 10**30 + 1}}, "kernel must be at most"),
        ({"compress": "pyramidkv", "allocator_params": {"beta": 1e12}}, "beta must be"),
        ({"compress": "dynamickv", "allocator_params": {"r_max": 1e30}}, "r_max must be"),
        ({"compress": "dynamickv", "allocator_params": {"every": 10**6}}, "every must be at most"),
        ({"compress": "streamingllm", "scorer_params": {"sinks": 10**9}}, "sinks must be at most"),
        ({"compress": "lagkv", "scorer_params": {"lag": 10**9}}, "lag must be at most 4096"),
        ({"compress": "d2o", "allocator_params": {"floor": 10**9}}, "floor must be at most"),
        ({"compress": "d2o", "allocator_params": {"skip_layers": [10**9]}}, "skip_layers must"),
        ({"compress": "chunkkv", "selector_params": {"size": 10**9}}, "size must be at most"),
        ({"compress": "chunkkv", "selector_params": {"reuse": 10**9}}, "reuse must be at most"),
        ({"compress": "random", "scorer_params": {"seed": 2**64}}, "seed must be at most"),
        ({"compress": "random", "scorer_params": {"seed": -1}}, "random.seed must be a whole"),
    ],
)
def test_parameters_of_an_extreme_size_are_refused(raw, words):
    refused(words, raw={"compress": "cake", **raw})


def test_parameters_of_a_sensible_size_are_accepted():
    assert parse(allocator_params={"tau1": 0.1, "tau2": 3}).enabled
    assert parse(scorer_params={"gamma": 0}).enabled
    assert parse("snapkv", scorer_params={"kernel": 1023}).enabled
    assert parse("random", scorer_params={"seed": 2**32 - 1}).enabled
    assert parse("chunkkv", selector_params={"size": 256}).enabled
