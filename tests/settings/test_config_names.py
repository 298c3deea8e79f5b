"""Names of methods, parameters and aliases; whole numbers."""

import math

import pytest
from hypothesis import settings

from settings_as_written import parse, refused
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.registry import SCORERS
from vllm_kvcompress.settings.config import MAX_WINDOW, CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

prop = settings(derandomize=True, deadline=None, max_examples=100)
NAN, INF = math.nan, math.inf


# -- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "suggestion"),
    [
        ({"compress": "cakes"}, "cake"),
        ({"compress": "snap-kv"}, "snapkv"),
        ({"compress": "Pyramidkv"}, "pyramidkv"),
        ({"compress": "streaming"}, "streamingllm"),
        ({"compres": "cake"}, "compress"),
        ({"compress": "cake", "budgets": 0.1}, "budget"),
        ({"compress": "cake", "min-prompt": 5}, "min_prompt"),
        ({"compress": "cake", "allocator": "pyramids"}, "pyramid"),
        ({"compress": "cake", "scorer": "snap"}, "snapkv"),
        ({"compress": "cake", "selector": "top_k"}, "topk"),
        ({"compress": "cake", "allocator_params": {"tau": 1}}, "tau"),
        ({"compress": "cake", "scorer_params": {"kernal": 5}}, "kernel"),
        ({"compress": "snapkv", "scorer_params": {"pool": "avg"}}, "pooling"),
    ],
    ids=str,
)
def test_unknown_names_suggest_the_nearest(raw, suggestion):
    refused(f"did you mean '{suggestion}", raw=raw)


UNKNOWN = [{"zzz": 1}, {3: 1}, *({"compress": name} for name in ("zzz", None, True, 3, ""))]
OF_CAKE = [{role: "zzz"} for role in ("allocator", "scorer", "selector")]
OF_CAKE += [{"allocator": 3}, {"log_requests": "perhaps"}]
OF_CAKE += [{"allocator_params": {name: 1}} for name in ("zzz", 3)]


@pytest.mark.parametrize("raw", UNKNOWN + [{"compress": "cake", **raw} for raw in OF_CAKE], ids=str)
def test_unknown_names_without_a_suggestion_are_refused(raw):
    assert "did you mean" not in refused(raw=raw)


def test_unknown_names_list_the_known():
    refused("'cake'", "'dynamickv'", "'off'", "'random'", "'tova'", raw={"compress": "zzz"})
    refused("'cake', 'd2o', 'dynamickv', 'global', 'pyramid', 'uniform'", allocator="zzz")
    refused(*map(repr, SCORERS), scorer="zzz")
    refused("'gamma', 'kernel'", scorer_params={"zzz": 1})
    refused("'budget', 'budget_bounds', 'compress'", raw={"zzz": 1})


@pytest.mark.parametrize(
    "raw", [None, "cake", 0.1, True, [("compress", "cake")], {"cake"}], ids=str
)
def test_settings_are_an_object(raw):
    with pytest.raises(ConfigError, match="must be an object"):
        CompressionConfig.parse(raw)


# -- parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [0, -1, 2, 4, 5.0, 1.5, "5", "ten", NAN, True, INF, None, [5]])
@pytest.mark.parametrize("preset", ["cake", "snapkv"])
def test_kernel_is_odd_and_whole(preset, kernel):
    refused(raw={"compress": preset, "scorer_params": {"kernel": kernel}})


@pytest.mark.parametrize("sinks", [-1, 4.0, 1.5, "ten", NAN, True, INF])
def test_sinks_are_whole(sinks):
    refused("sinks", raw={"compress": "streamingllm", "scorer_params": {"sinks": sinks}})


def test_parameters_cannot_be_none():
    refused("scorer_params", "None", raw={"compress": "cake", "scorer_params": {"kernel": None}})


@pytest.mark.parametrize("gamma", [-1, -0.5, "ten", NAN, True, INF])
def test_gamma(gamma):
    refused("gamma", repr(gamma), scorer_params={"gamma": gamma})
    assert parse(scorer_params={"gamma": 0}).method.scorer.gamma == 0


@pytest.mark.parametrize("tau", [0, -1, 0.0, "ten", NAN, True, INF])
@pytest.mark.parametrize("name", ["tau1", "tau2"])
def test_tau(name, tau):
    refused(name, repr(tau), allocator_params={name: tau})


@pytest.mark.parametrize("beta", [1, 1.0, 0, -1, 0.5, "ten", NAN, True, INF])
def test_beta(beta):
    """JSON has no infinity, so it could not be sent to the workers."""
    refused("beta", repr(beta), raw={"compress": "pyramidkv", "allocator_params": {"beta": beta}})


@pytest.mark.parametrize("kind", ["mean", "", 3, True])
def test_pooling(kind):
    refused("pooling", repr(kind), raw={"compress": "snapkv", "scorer_params": {"pooling": kind}})


@pytest.mark.parametrize("key", ["allocator_params", "scorer_params"])
@pytest.mark.parametrize("value", ["beta=10", 3, True, None, ["beta", 10], [1]])
def test_params_are_objects(key, value):
    refused(key, **{key: value})


# -- further names of the model ---------------------------------------------------------------


def test_an_alias_can_be_written_in_three_ways():
    texts = ["llama@kv0.2=cake:0.2", "a=b:c=tova:64", "full=off"]
    ways = [texts, {"llama@kv0.2": "cake:0.2", " a=b:c ": "tova : 64", "full": False}]
    for way in ways:
        found = [(alias.name, alias.method, alias.budget) for alias in parse(alias=way).alias]
        assert found == [("llama@kv0.2", "cake", 0.2), ("a=b:c", "tova", 64), ("full", "off", None)]
        assert type(parse(alias=way).alias[1].budget) is int
    assert parse(alias="one=cake:1024").alias[0].budget == 1024
    assert parse().alias == parse(alias=[]).alias == ()


def test_an_alias_can_set_the_format_of_kept_tokens():
    config = parse(alias=["a=b=cake:0.4:k4v3", "c=tova : 64 : auto", "d=cake:0.5"])
    found = [(alias.name, alias.packed_dtype) for alias in config.alias]
    assert found == [("a=b", "k4v3"), ("c", "auto"), ("d", None)]
    assert [*map(str, config.alias)] == ["a=b=cake:0.4:k4v3", "c=tova:64:auto", "d=cake:0.5"]
    formats = [config.alias_settings(alias).resolved_packed_dtype for alias in config.alias]
    assert formats == ["k4v3", "auto", "auto"]
    assert CompressionConfig.parse(config.to_additional_config()) == config
    k4v3 = parse(packed_dtype="k4v3", alias=["a=tova:64:auto", "b=tova:64"])
    assert [variant.resolved_packed_dtype for variant in k4v3.variants] == ["k4v3", "auto", "k4v3"]


def test_a_method_name_may_contain_a_hyphen():
    """In lists, aliases and requests."""
    allowed = " off, cake-chunk ,layer-defensivekv"
    config = parse("snapkv", allow_override=allowed, alias="a-b=cake-chunk:0.3")
    assert config.allow_override == ("off", "cake-chunk", "layer-defensivekv")
    assert [(x.name, x.method, x.budget) for x in config.alias] == [("a-b", "cake-chunk", 0.3)]
    assert CompressionConfig.parse(config.to_additional_config()) == config
    request = {"kv_compress": "layer-defensivekv", "kv_budget": 0.5}
    chosen = RequestOptions.parse(config, request).settings
    assert (chosen.compress, chosen.budget) == ("layer-defensivekv", 0.5)
    assert RequestOptions.parse(config, {"kv_alias": "a-b"}).settings.compress == "cake-chunk"
    refused("did you mean 'cake-chunk'?", raw={"compress": "cake_chunk"})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "NAME=METHOD:BUDGET"),
        ("cake:0.2", "got 'cake:0.2'"),
        ("=cake:0.2", "NAME=METHOD:BUDGET"),
        (" =cake:0.2", "NAME=METHOD:BUDGET"),
        ("a=", "'a': method='' is unknown"),
        ("a=cake", "got 'a=cake'"),
        ("a=cake:", "'a': budget must be a ratio"),
        ("a=cake:2.0", "got '2.0'"),
        ("a=cake:0", "got '0'"),
        ("a=cake:20", "window of 32"),
        ("a=cak:0.2", "did you mean 'cake'"),
        ("a=custom:0.2", "'custom' is unknown"),
        ("a=off:0.2", "off takes no budget, got 'off:0.2'"),
        ("a=off:k4v3", "off takes no budget, got 'off:k4v3'"),
        ("a=cake:k4v3", "'a': budget must be a ratio"),
        ("a=cake:0.2:", "'a': packed_dtype='' is unknown"),
        ("a=cake:0.2:k4v4", "did you mean 'k4v3'?"),
        ("a=cake:0.2:k4v3:auto", "'a': packed_dtype='k4v3:auto' is unknown"),
        (["a=cake:0.2", "a=tova:0.2"], "'a' is given twice"),
        ({"a": "cake:0.2", "a ": "off"}, "'a' is given twice"),
        ({"a": 0.2}, "got 'a=0.2'"),
        ({3: "cake:0.2"}, "got '3=cake:0.2'"),
        ([3], "got '3'"),
        (3, "got '3'"),
        (None, "got 'None'"),
    ],
)
def test_malformed_aliases_are_refused(value, words):
    refused(words, alias=value)


def test_aliases_alone_compress_only_on_request():
    config = CompressionConfig.parse({"compress": "off", "alias": "a=cake:0.2"})
    assert (config.enabled, config.active) == (False, True)
    assert [(v.compress, v.budget) for v in config.variants] == [("cake", 0.2)]
    off = CompressionConfig.parse({"compress": "off", "alias": "a=off"})
    assert (off.active, off.variants) == (False, ())


def test_an_alias_of_the_servers_method_changes_only_the_budget():
    config = parse(window=16, allocator_params={"tau1": 3.0}, alias=["a=cake:0.5", "b=tova:0.5"])
    first, second = (config.alias_settings(alias) for alias in config.alias)
    assert (first.resolved_window, first.budget) == (16, 0.5)
    assert first.allocator_params == (("tau1", 3.0),)
    assert (second.resolved_window, second.allocator_params) == (1, ())
    assert first.alias == second.alias == ()
    assert config.variants == (config, first, second)
    assert len(parse(alias=["a=tova:0.5", "b=tova:0.5"]).variants) == 2


# -- whole numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["window", "min_prompt"])
@pytest.mark.parametrize("value", [-1, 1.5, "ten", NAN, True, False, INF, -INF, "1.5", [8], "", {}])
def test_whole_numbers(key, value):
    refused(key, repr(value), **{key: value})


@pytest.mark.parametrize("key", ["window", "min_prompt"])
@pytest.mark.parametrize("value", [64, "64", 64.0])
def test_whole_numbers_in_other_types(key, value):
    got = parse(**{key: value}).value(key)
    assert got == 64
    assert type(got) is int


def test_min_prompt_cannot_be_none():
    refused("min_prompt", min_prompt=None)


def test_window_has_a_limit():
    refused("window", "1024", window=MAX_WINDOW + 1)
    assert parse(window=MAX_WINDOW).resolved_window == MAX_WINDOW


def test_window_of_cake():
    """A sample variance over one query does not exist (docs/methods.md 2.3)."""
    for window in (0, 1):
        refused("window", f"got {window}", window=window)
        refused("window", raw={"compress": "snapkv", "allocator": "cake", "window": window})
        refused("window", raw={"compress": "snapkv", "scorer": "cake", "window": window})
    refused("variance", "at least 2", window=1)
    refused("at least 2", raw={"compress": "streamingllm", "allocator": "cake"})
    assert parse(window=2).resolved_window == 2


def test_window_of_snapkv():
    for name in ("snapkv", "pyramidkv"):
        refused(f"at least 1 for {name!r}, got 0", raw={"compress": name, "window": 0})
        assert parse(name, window=1).resolved_window == 1
    assert parse("streamingllm", scorer="snapkv").resolved_window == 32  # the scorer's own
    assert parse("streamingllm", window=0).resolved_window == 0
