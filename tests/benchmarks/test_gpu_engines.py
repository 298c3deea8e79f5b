"""The stages with an engine, dry: both engines in this process, a tiny random Llama."""

import json
import os
from contextlib import contextmanager

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import pytest
import torch

from benchmarks.gpu import serving, tokens
from benchmarks.gpu.engine_process import Engine
from benchmarks.gpu.report import Report
from benchmarks.gpu.summary import failures

pytestmark = pytest.mark.engine


class Here:
    """Answers as an engine in a process of its own does: what comes back went through JSON."""

    def __init__(self, engine):
        self._engine = engine

    def ask(self, method, **named):
        named = json.loads(json.dumps(named))
        return json.loads(json.dumps(getattr(self._engine, method)(**named)))


@contextmanager
def both_here(model, settings, **options):
    engines = [Engine(model, chosen, options) for chosen in (None, settings)]
    yield tuple(map(Here, engines))


def ran(stage, monkeypatch, tmp_path):
    monkeypatch.setattr(stage, "both", both_here)
    report = Report(stage.__name__.rsplit(".")[-1], tmp_path, True, "abc", 0)
    stage.run(report, torch.device("cpu"))
    report.finish()
    assert failures([report.data]) == []
    return report.data


def test_dry_run_of_the_tokens(monkeypatch, tmp_path):
    found = ran(tokens, monkeypatch, tmp_path)
    checks = {check["name"].removeprefix("CPU_ATTN, eager: "): check for check in found["checks"]}
    assert checks["short prompts at budget 0.1: share of equal tokens"]["result"] == "pass"
    assert checks["first tokens at budget 0.5: share of equal tokens"]["result"] == "pass"
    assert checks["compressed at 0.5"]["figure"] == len(tokens.DRY_LONG)
    assert checks["plugin: decode steps in FULL graphs"]["result"] == "dry"
    assert checks["requests compressed while syncs were counted"]["result"] == "pass"
    every = "CPU_ATTN, eager, all features: "
    assert [name for name in checks if name.startswith(every)] == [
        every + name
        for name in (
            "compressed",
            "pieces packed",
            "judged by answers",
            "answers packed again",
            "requests compressed while syncs were counted",
            "host syncs made by the plugin",
            "host syncs more than without the plugin",
            "vLLM: decode steps in FULL graphs",
            "plugin: decode steps in FULL graphs",
        )
    ]
    assert [row["engine"] for row in found["tables"]["engines"]] == ["vLLM", "plugin"]


def test_dry_run_of_serving(monkeypatch, tmp_path):
    found = ran(serving, monkeypatch, tmp_path)
    counts = [check for check in found["checks"] if check["name"].endswith("requests compressed")]
    assert [check["result"] for check in counts] == ["pass"] * 2
    caches = {row["cache"]: row for row in found["tables"]["one pool"]}
    assert caches["0.1"]["most_at_once"] > caches["full cache"]["most_at_once"]
    judged = [check["name"] for check in found["checks"] if check["result"] == "dry"]
    assert sum("first token, budget" in name for name in judged) == 2


def test_engines_take_turns():
    """Every kind in every round, in an order that turns around; the first round is not counted."""
    turns, order = serving.Turns(None, None, None, {}, serving.DRY), []

    def kind(name):
        def ask(number):
            order.append((number, name))
            return {"step_ms": float(number)}

        return ask

    found = turns._rounds(2, {"a": kind("a"), "b": kind("b")})
    assert order == [(0, "b"), (0, "a"), (1, "a"), (1, "b"), (2, "b"), (2, "a")]
    assert found["a"] == found["b"] == [{"step_ms": 1.0}, {"step_ms": 2.0}]
