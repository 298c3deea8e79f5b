"""The tables of refusals: what their texts read, the pairs of features, and k4v3's rules."""

import itertools
import string

import pytest

from vllm_kvcompress.planning.model_traits import Traits
from vllm_kvcompress.refusals import tested
from vllm_kvcompress.refusals.model import MODEL
from vllm_kvcompress.refusals.requests import CHOICES
from vllm_kvcompress.refusals.rule import refusal
from vllm_kvcompress.refusals.server import SERVER, Server
from vllm_kvcompress.refusals.settings import METHOD, REQUESTS
from vllm_kvcompress.settings.config import CompressionConfig

RULES = (*REQUESTS, *METHOD, *MODEL, *SERVER, *CHOICES)
CAKE = CompressionConfig.parse({"compress": "cake"})
K4V3 = CompressionConfig.parse({"compress": "cake", "packed_dtype": "k4v3"})
ALIAS = CompressionConfig.parse({"compress": "off", "alias": "small=cake:0.4:k4v3"})


EAGLE = {"--speculative-config": "eagle", "draft layers": True}


def reason_for(settings, model=None, **facts):
    """Return the first reason against a server."""
    return refusal(SERVER, Server(settings=settings, model=model or Traits(), **facts))


def test_every_documented_rule_has_its_own_name():
    names = [rule.name for rule in RULES if rule.name]
    assert len({*names}) == len(names) > 40


def test_a_documented_reason_has_no_placeholder():
    for rule in RULES:
        text = rule.because or rule.reason
        placeholders = [name for _, name, *_ in string.Formatter().parse(text) if name]
        assert not (rule.name and placeholders), rule.name


def test_an_unknown_server_is_not_refused():
    assert reason_for(CAKE) is None


def test_each_pair_of_features_is_listed_once():
    names = list(tested.TOGETHER)
    accepted = [(a, b) for a, others in tested.TOGETHER.items() for b in others]
    assert {b for _, b in accepted} <= {*names}
    pairs = {*accepted, *tested.untested_pairs()}
    assert pairs >= {*itertools.combinations(names, 2)}
    assert len({*accepted}) == len(accepted)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"--speculative-config": "ngram", "--pipeline-parallel-size": 2},
            "--speculative-config and --pipeline-parallel-size were not tested together; remove"
            " --speculative-config or --pipeline-parallel-size",
        ),
        ({"--speculative-config": "ngram", "--tensor-parallel-size": 2}, None),
        (
            {**EAGLE, "--tensor-parallel-size": 2},
            "draft layers and --tensor-parallel-size were not tested together; remove"
            " --tensor-parallel-size",
        ),
        ({**EAGLE, "--speculative-config": "eagle3"}, None),
    ],
)
def test_a_pair_of_features_needs_a_test(options, reason):
    assert reason_for(CAKE, options=options) == reason


@pytest.mark.parametrize("settings", [K4V3, ALIAS])
def test_draft_layers_with_packed_groups_are_refused(settings):
    reason = reason_for(settings, options=EAGLE)
    assert "draft layers are not tested with k4v3; set packed_dtype to auto" in reason
    assert "ngram" in reason
    assert reason_for(settings, options={"--speculative-config": "ngram"}) is None


def test_a_step_needs_space_for_one_token_per_request_and_a_probe():
    pieces = {"compress": "cake", "max_whole": 4096, "piece": 1024, "probe": 32}
    options = {"--max-num-seqs": 4, "--max-num-batched-tokens": 36}
    assert reason_for(CompressionConfig.parse(pieces), options=options) is None
    options["--max-num-batched-tokens"] = 35
    reason = reason_for(CompressionConfig.parse(pieces), options=options)
    assert "must have space for one token per request and then a probe of 32 tokens" in reason
    flag = "--max-num-batched-tokens"
    assert f"set {flag} to at least 36, got 35, or lower --max-num-seqs, --kv-probe" in reason


@pytest.mark.parametrize("settings", [K4V3, ALIAS])
@pytest.mark.parametrize("cache", ["fp8", "fp8_e4m3"])
def test_k4v3_needs_a_cache_in_the_models_dtype(settings, cache):
    reason = reason_for(settings, Traits(cache=cache))
    assert f"cannot be combined with a {cache} KV cache" in reason
    assert "set --kv-cache-dtype auto, or set packed_dtype to auto" in reason
    assert reason_for(settings) is None
    assert reason_for(CAKE, Traits(cache=cache)) is None


@pytest.mark.parametrize("settings", [K4V3, ALIAS])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "itemsize", "words"),
    [
        (32, 16, 2, ("at least 64", "this model has 32; set packed_dtype to auto")),
        (100, None, 4, ("multiple of 8", "this model has 100")),
        (128, 24, 2, ("a multiple of 16", "got blocks of 24; set --block-size 16, or")),
        (128, 8, 2, ("a multiple of 16", "got blocks of 8; set --block-size 16, or")),
        (64, 12, 4, ("a multiple of 8", "got blocks of 12; set --block-size 8, or")),
    ],
)
def test_k4v3_needs_pages_that_hold_whole_groups(settings, head_dim, block_size, itemsize, words):
    shape = {"head_dim": head_dim, "block_size": block_size, "itemsize": itemsize}
    reason = reason_for(settings, **shape)
    assert all(word in reason for word in words), reason
    assert reason_for(CAKE, **shape) is None


@pytest.mark.parametrize(
    ("head_dim", "block_size", "itemsize"),
    [(64, 16, 2), (80, 128, 2), (128, 528, 2), (256, None, 2), (64, 8, 4)],
)
def test_other_pages_hold_whole_groups(head_dim, block_size, itemsize):
    shape = {"head_dim": head_dim, "block_size": block_size, "itemsize": itemsize}
    assert reason_for(K4V3, **shape) is None


def test_parking_is_refused_where_no_request_can_be_parked():
    def parked(**options):
        return CompressionConfig.parse({"compress": "cake", "park": 16, **options})

    assert reason_for(parked()) is None
    assert reason_for(parked(), options={tested.NGRAM: "ngram"}) is None
    for feature in (tested.TENSOR, tested.PIPELINE, tested.DATA, tested.RAY):
        reason = f"{feature} and --kv-park were not tested together; remove {feature} or --kv-park"
        assert reason_for(parked(), options={feature: 2}) == reason
    grid = parked(budget=1.0, packed_dtype="k4v3", reuse="grid")
    assert "--kv-reuse and --kv-park were not tested together" in reason_for(grid)
    bounded = reason_for(parked(decode_budget=512))
    assert bounded == (
        "only requests that need no more packing can be parked, and --kv-decode-budget packs"
        " again; remove --kv-park 16.0, or --kv-decode-budget"
    )
    outputs = reason_for(parked(packed_dtype="k4v3", decode_interval=256))
    assert outputs is not None
    assert outputs.endswith("remove --kv-park 16.0, or --kv-decode-interval")
    assert reason_for(parked(), host_bytes=16 * 2**30) is None
    assert reason_for(parked(), host_bytes=16 * 2**30 - 1) == (
        "--kv-park must be at most the memory of this machine, 15.9 GiB, got 16.0; lower it, and"
        " leave memory for the process"
    )
