"""Parameters that a method's part refuses; `tests/settings` has those of the oldest presets."""

import math

import pytest

from settings_as_written import refused

REFUSED = {
    ("allocator", "cake"): [
        *(({name: tau}, f"cake.{name} must be between 0.05 and 20, got {tau}")
          for name in ("tau1", "tau2") for tau in (1e-3, 50.0)),
    ],
    ("allocator", "pyramid"): [({"beta": beta}, "beta must be > 1") for beta in (1.0, -3.0)],
    ("allocator", "dynamickv"): [
        *(({"r_max": value}, "r_max") for value in (0.5, math.nan, math.inf)),
        ({"every": 0}, "every"),
    ],
    ("allocator", "d2o"): [({"norm": "minmax"}, "norm must be"), ({"floor": -1}, "floor")],
    ("scorer", "cake"): [
        ({"kernel": -3}, "odd whole number"),
        ({"gamma": -1.0}, "cake.gamma must be a finite number >= 0"),
    ],
    ("scorer", "snapkv"): [
        ({"kernel": 2}, "odd whole number"),
        ({"pooling": "mean"}, "must be one of"),
    ],
    ("scorer", "streamingllm"): [({"sinks": -1}, "must be a whole number >= 0")],
    ("scorer", "runs"): [
        ({"size": 0}, "runs.size must be a whole number >= 1, got 0"),
        ({"attention": 0.0}, "must be in (0, 20], at most the tokens of a run, got 0.0"),
        ({"attention": math.nan}, "attention"),
        ({"size": 3, "attention": 3.5}, "in (0, 3]"),
        ({"gamma": -1.0}, "cake.gamma"),
    ],
    ("scorer", "lagkv"): [
        ({"sinks": -1}, "lagkv.sinks must be a whole number >= 0, got -1"),
        ({"lag": 1}, "lagkv.lag must be a whole number >= 2, got 1"),
        ({"lag": 0}, "lagkv.lag must be a whole number >= 2, got 0"),
        ({"lag": 128.0}, "lag must be a int like 128, got 128.0"),
        ({"lags": 64}, "no parameter 'lags'; did you mean 'lag'"),
    ],
    ("selector", "chunks"): [({"size": 0}, "chunks.size"), ({"reuse": 0}, "chunks.reuse")],
    ("selector", "heavy_recent"): [
        ({"sinks": -1}, "heavy_recent.sinks"),
        ({"recent": 1.5}, "recent"),
    ],
}  # fmt: skip
CASES = [(*part, *case) for part, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("role", "name", "params", "message"), CASES)
def test_a_bad_parameter_is_refused(role, name, params, message):
    scorer = {"scorer": "snapkv"} if role != "scorer" else {}
    assert message in refused(raw={**scorer, role: name, f"{role}_params": params})
