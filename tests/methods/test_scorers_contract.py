"""What a scorer is shown, and what it may return: the first scorer of somebody's own meets both."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.scorers import SCORERS
from vllm_kvcompress.offline import compress
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import method_of

LAYERS, HEADS, KV_HEADS, TOKENS, DIM, WINDOW = 2, 4, 2, 60, 8, 5
SHOWN = {
    "nothing": (Reads.NOTHING, set()),
    "window": (Reads.WINDOW, {"total", "recent", "last"}),
    "variance": (Reads.WINDOW | Reads.VARIANCE, {"total", "variance", "recent", "last"}),
    "maximum": (Reads.WINDOW | Reads.MAXIMUM, {"total", "recent", "last", "maximum"}),
    "pooled": (
        Reads.WINDOW | Reads.MAXIMUM | Reads.POOLED,
        {"total", "recent", "last", "maximum"},
    ),
    "column_sums": (Reads.COLUMN_SUMS, {"sums"}),
    "keys": (Reads.KEYS, {"keys"}),
    "values": (Reads.VALUES, {"values"}),
    "all": (
        ~Reads.NOTHING,
        {"total", "variance", "recent", "last", "maximum", "sums", "keys", "values"},
    ),
}


def run(monkeypatch, scorer, **params):
    """Keep some of a prompt with a scorer that is in the table for this test alone."""
    monkeypatch.setitem(SCORERS, "own", scorer)
    method_of.cache_clear()  # settings are equal by their names
    generator = torch.Generator().manual_seed(3)
    shapes = ((LAYERS, HEADS, TOKENS, DIM), *[(LAYERS, KV_HEADS, TOKENS, DIM)] * 2)
    tensors = (torch.randn(shape, generator=generator) for shape in shapes)
    policy = {"scorer": "own", "window": WINDOW, "scorer_params": params}
    return compress(*tensors, policy=policy, budget=20)


@pytest.mark.parametrize("reads", SHOWN)
def test_a_scorer_is_shown_what_it_reads_and_nothing_else(monkeypatch, reads):
    asked, expected = SHOWN[reads]
    shown = []

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Own:
        reads: ClassVar[Reads] = asked

        def score(self, columns):
            fields = ("total", "variance", "recent", "last", "maximum", "sums", "keys", "values")
            shown.append({name for name in fields if getattr(columns, name) is not None})
            return torch.zeros(columns.num_kv_heads, columns.past)

    run(monkeypatch, Own)
    assert shown == [expected] * LAYERS


@pytest.mark.parametrize(
    "wrong",
    [
        lambda columns: torch.zeros(HEADS, columns.past),
        lambda columns: torch.zeros(KV_HEADS, TOKENS),
        lambda columns: torch.zeros(columns.past),
        lambda columns: torch.zeros(KV_HEADS, columns.past, dtype=torch.float64),
    ],
    ids=["query heads", "the window too", "one row", "float64"],
)
def test_other_scores_are_refused_by_the_scorers_name(monkeypatch, wrong):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Hasty:
        reads: ClassVar[Reads] = Reads.NOTHING

        def score(self, columns):
            return wrong(columns)

    with pytest.raises(ValueError, match=r"scorer Hasty must return float32 scores \(2, 55\)"):
        run(monkeypatch, Hasty)


@pytest.mark.parametrize("default", [None, frozenset()], ids=["None", "a set"])
def test_a_parameter_has_a_default_that_tells_its_type(monkeypatch, default):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Vague:
        reads: ClassVar[Reads] = Reads.NOTHING
        alpha: object = default

    monkeypatch.setitem(SCORERS, "own", Vague)
    with pytest.raises(ConfigError, match="parameter 'alpha' must have a default"):
        CompressionConfig.parse({"scorer": "own", "scorer_params": {"alpha": 1.0}})


def test_a_parameter_without_a_default_is_named(monkeypatch):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Bare:
        reads: ClassVar[Reads] = Reads.NOTHING
        alpha: float

    monkeypatch.setitem(SCORERS, "own", Bare)
    with pytest.raises(ConfigError, match="parameter 'alpha' must have a default"):
        CompressionConfig.parse({"scorer": "own"})
