"""The statistics that a scorer gets and the scores it may return, for authors of new scorers."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.registry import SCORERS
from vllm_kvcompress.offline import compress
from vllm_kvcompress.settings.config import CompressionConfig

LAYERS, HEADS, KV_HEADS, TOKENS, DIM, WINDOW = 2, 4, 2, 60, 8, 5
STATS_BY_READS = {
    "nothing": (Reads.NOTHING, set()),
    "window": (Reads.WINDOW, {"total", "recent"}),
    "last": (Reads.WINDOW | Reads.LAST, {"total", "recent", "last"}),
    "variance": (Reads.WINDOW | Reads.VARIANCE, {"total", "variance", "recent"}),
    "maximum": (Reads.WINDOW | Reads.MAXIMUM, {"total", "recent", "maximum"}),
    "pooled": (Reads.WINDOW | Reads.MAXIMUM | Reads.POOLED, {"total", "recent", "maximum"}),
    "column_sums": (Reads.COLUMN_SUMS, {"sums"}),
    "keys": (Reads.KEYS, {"keys"}),
    "values": (Reads.VALUES, {"values"}),
    "all": (
        ~Reads.NOTHING,
        {"total", "variance", "recent", "last", "maximum", "sums", "keys", "values"},
    ),
}


def run(monkeypatch, scorer, **params):
    """Compress a prompt with a scorer that is in the table only for this test."""
    monkeypatch.setitem(SCORERS, "custom-scorer", scorer)
    generator = torch.Generator().manual_seed(3)
    shapes = ((LAYERS, HEADS, TOKENS, DIM), *[(LAYERS, KV_HEADS, TOKENS, DIM)] * 2)
    tensors = (torch.randn(shape, generator=generator) for shape in shapes)
    policy = {"scorer": "custom-scorer", "window": WINDOW, "scorer_params": params}
    return compress(*tensors, policy=policy, budget=20)


@pytest.mark.parametrize("reads", STATS_BY_READS)
def test_a_scorer_gets_only_the_statistics_it_reads(monkeypatch, reads):
    declared_reads, expected = STATS_BY_READS[reads]
    received = []

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Recorder:
        reads: ClassVar[Reads] = declared_reads

        def score(self, stats):
            fields = ("total", "variance", "recent", "last", "maximum", "sums", "keys", "values")
            received.append({name for name in fields if getattr(stats, name) is not None})
            return torch.zeros(stats.num_kv_heads, stats.past)

    run(monkeypatch, Recorder)
    assert received == [expected] * LAYERS


@pytest.mark.parametrize(
    "wrong",
    [
        lambda stats: torch.zeros(HEADS, stats.past),
        lambda stats: torch.zeros(KV_HEADS, TOKENS),
        lambda stats: torch.zeros(stats.past),
        lambda stats: torch.zeros(KV_HEADS, stats.past, dtype=torch.float64),
    ],
    ids=["query heads", "the window too", "one row", "float64"],
)
def test_wrong_scores_are_refused_with_the_scorers_name(monkeypatch, wrong):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class WrongShape:
        reads: ClassVar[Reads] = Reads.NOTHING

        def score(self, stats):
            return wrong(stats)

    with pytest.raises(ValueError, match=r"scorer WrongShape must return float32 scores \(2, 55\)"):
        run(monkeypatch, WrongShape)


@pytest.mark.parametrize("default", [None, frozenset()], ids=["None", "a set"])
def test_a_parameter_default_must_give_its_type(monkeypatch, default):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class NoType:
        reads: ClassVar[Reads] = Reads.NOTHING
        alpha: object = default

    monkeypatch.setitem(SCORERS, "custom-scorer", NoType)
    with pytest.raises(ConfigError, match="parameter 'alpha' must have a default"):
        CompressionConfig.parse({"scorer": "custom-scorer", "scorer_params": {"alpha": 1.0}})


def test_a_parameter_without_a_default_is_refused(monkeypatch):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class NoDefault:
        reads: ClassVar[Reads] = Reads.NOTHING
        alpha: float

    monkeypatch.setitem(SCORERS, "custom-scorer", NoDefault)
    with pytest.raises(ConfigError, match="parameter 'alpha' must have a default"):
        CompressionConfig.parse({"scorer": "custom-scorer"})
