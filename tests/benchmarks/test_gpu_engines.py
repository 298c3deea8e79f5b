"""Dry runs of the stages with engines: both engines in this process, a tiny random Llama."""

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


class InProcessEngine:
    """Replaces `EngineProcess`: arguments and results go through JSON as with a process."""

    def __init__(self, engine):
        self._engine = engine

    def call(self, method, **arguments):
        arguments = json.loads(json.dumps(arguments))
        return json.loads(json.dumps(getattr(self._engine, method)(**arguments)))


@contextmanager
def in_process_pair(model, settings, **options):
    engines = [Engine(model, plugin_settings, options) for plugin_settings in (None, settings)]
    yield tuple(map(InProcessEngine, engines))


def run_stage(stage, monkeypatch, tmp_path):
    monkeypatch.setattr(stage, "engine_pair", in_process_pair)
    report = Report(stage.__name__.rsplit(".")[-1], tmp_path, True, "abc", 0)
    stage.run(report, torch.device("cpu"))
    report.finish()
    assert failures([report.data]) == []
    return report.data


def test_the_tokens_stage_passes_in_a_dry_run(monkeypatch, tmp_path):
    found = run_stage(tokens, monkeypatch, tmp_path)
    checks = {check["name"].removeprefix("CPU_ATTN, eager: "): check for check in found["checks"]}
    assert checks["short prompts at budget 0.1: share of equal tokens"]["result"] == "pass"
    assert checks["first tokens at budget 0.5: share of equal tokens"]["result"] == "pass"
    assert checks["compressed at 0.5"]["figure"] == len(tokens.DRY_LONG)
    assert checks["plugin: decode steps in FULL graphs"]["result"] == "dry"
    assert checks["requests compressed while syncs were counted"]["result"] == "pass"
    prefix = "CPU_ATTN, eager, all features: "
    assert [name for name in checks if name.startswith(prefix)] == [
        prefix + name
        for name in (
            "compressed",
            "pieces packed",
            "prompts scored by output",
            "outputs packed again",
            "requests compressed while syncs were counted",
            "host syncs made by the plugin",
            "host syncs more than without the plugin",
            "vLLM: decode steps in FULL graphs",
            "plugin: decode steps in FULL graphs",
        )
    ]
    assert [row["engine"] for row in found["tables"]["engines"]] == ["vLLM", "plugin"]


def test_the_serving_stage_passes_in_a_dry_run(monkeypatch, tmp_path):
    found = run_stage(serving, monkeypatch, tmp_path)
    counts = [check for check in found["checks"] if check["name"].endswith("requests compressed")]
    assert [check["result"] for check in counts] == ["pass"] * 2
    caches = {row["cache"]: row for row in found["tables"]["one pool"]}
    assert caches["0.1"]["most_at_once"] > caches["full cache"]["most_at_once"]
    dry = [check["name"] for check in found["checks"] if check["result"] == "dry"]
    assert sum("first token, budget" in name for name in dry) == 2


def test_workloads_alternate_and_the_warm_up_round_is_dropped():
    turns, order = serving.Turns(None, None, None, {}, serving.DRY), []

    def workload(name):
        def run_round(number):
            order.append((number, name))
            return {"step_ms": float(number)}

        return run_round

    found = turns._rounds(2, {"a": workload("a"), "b": workload("b")})
    assert order == [(0, "b"), (0, "a"), (1, "a"), (1, "b"), (2, "b"), (2, "a")]
    assert found["a"] == found["b"] == [{"step_ms": 1.0}, {"step_ms": 2.0}]
