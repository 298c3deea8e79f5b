"""Dry runs of the stages with engines: both engines in this process, a tiny random Llama."""

import gzip
import json
import os
from contextlib import contextmanager

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import pytest
import torch

from benchmarks.gpu import drafts, serving, switches, tokens
from benchmarks.gpu.engine import Engine
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


def run_stage(name, stage, run, monkeypatch, tmp_path):
    monkeypatch.setattr(stage, "engine_pair", in_process_pair)
    report = Report(name, tmp_path, True, "abc", 0)
    run(report, torch.device("cpu"))
    report.finish()
    assert failures([report.data]) == []
    assert json.loads((tmp_path / f"{name}.json").read_text())["finished"]
    return report.data


def run_serving(name, monkeypatch, tmp_path):
    run = getattr(serving, f"run_{name}")
    return run_stage(name, serving, run, monkeypatch, tmp_path)


def test_the_tokens_stage_passes_in_a_dry_run(monkeypatch, tmp_path):
    found = run_stage("tokens", tokens, tokens.run, monkeypatch, tmp_path)
    checks = {check["name"].removeprefix("CPU_ATTN, eager: "): check for check in found["checks"]}
    assert checks["short prompts at budget 0.1: share of equal tokens"]["result"] == "pass"
    assert checks["first tokens at budget 0.5: share of equal tokens"]["result"] == "pass"
    assert checks["compressed at 0.5"]["figure"] == len(tokens.DRY_LONG)
    assert checks["plugin: decode steps in FULL graphs"]["result"] == "dry"
    assert checks["requests compressed while syncs were counted"]["result"] == "pass"
    prefix = "CPU_ATTN, eager, all features: "
    features = ["compressed", "pieces packed", "prompts scored by output", "outputs packed again"]
    features += ["requests compressed while syncs were counted", "host syncs made by the plugin"]
    features += ["host syncs more than without the plugin"]
    features += [f"{engine}: decode steps in FULL graphs" for engine in ("vLLM", "plugin")]
    assert [name for name in checks if name.startswith(prefix)] == [prefix + x for x in features]
    assert [row["engine"] for row in found["tables"]["engines"]] == ["vLLM", "plugin"]


def checks_of(found):
    return {check["name"]: check for check in found["checks"]}


def test_the_switches_stage_pairs_its_variants_in_a_dry_run(monkeypatch, tmp_path):
    found = run_serving("switches", monkeypatch, tmp_path)
    variants = ["full cache", "plugin", *(f"without {name}" for name in switches.SWITCHES)]
    assert [row["variant"] for row in found["tables"]["requests"]] == variants
    (rounds,) = found["rounds"].values()
    assert {name: len(figures) for name, figures in rounds.items()} == dict.fromkeys(variants, 2)
    checks = checks_of(found)
    assert checks["1 x 256: first token, increase"]["result"] == "dry"
    assert checks["1 x 256: requests compressed"]["figure"] == 3 * (len(variants) - 1)
    compared = {(row["variant"], row["than"]) for row in found["tables"]["differences"]}
    assert compared == {("plugin", "full cache"), *((name, "plugin") for name in variants[2:])}
    with gzip.open(tmp_path / found["tables"]["traces"][0]["file"]) as file:
        assert json.load(file)["traceEvents"]


def test_a_switch_is_off_only_in_the_rounds_of_its_variant(monkeypatch, tmp_path):
    """The stage must measure the change, and leave the engine as it was."""
    from vllm_kvcompress.engine.worker.worker import CompressingWorker

    off, inner = [], Engine.decode

    def decode(engine, **arguments):
        off.append(vars(CompressingWorker)["_packs_after_sampling"] is False)
        return inner(engine, **arguments)

    monkeypatch.setattr(Engine, "decode", decode)
    run_serving("switches", monkeypatch, tmp_path)
    num_variants = 2 + len(switches.SWITCHES)
    assert (len(off), sum(off)) == (3 * num_variants, 3)
    assert vars(CompressingWorker)["_packs_after_sampling"] is not False


def test_the_long_stage_passes_in_a_dry_run(monkeypatch, tmp_path):
    found = run_serving("long", monkeypatch, tmp_path)
    assert checks_of(found)["1 x 384: first token, increase"]["result"] == "dry"


def test_the_gaps_stage_packs_while_it_decodes(monkeypatch, tmp_path):
    found = run_serving("gaps", monkeypatch, tmp_path)
    assert checks_of(found)["2 x 256, decoding: requests compressed"]["figure"] == 4
    rows = {row["variant"]: row for row in found["tables"]["requests"]}
    for row in rows.values():
        assert row["longest_gap_ms"] >= row["median_gap_ms"] > 0
        assert 2 <= row["longest_gap_token"] <= 40


def test_the_idle_stage_compresses_nothing(monkeypatch, tmp_path):
    found = run_serving("idle", monkeypatch, tmp_path)
    checks = checks_of(found)
    assert checks["2 x 64, nothing to compress: requests compressed"]["figure"] == 0
    assert sum(check["result"] == "dry" for check in checks.values()) == 2


def test_the_batches_stage_passes_in_a_dry_run(monkeypatch, tmp_path):
    found = run_serving("batches", monkeypatch, tmp_path)
    caches = {row["cache"]: row for row in found["tables"]["one pool"]}
    assert caches["0.1"]["most_at_once"] > caches["full cache"]["most_at_once"]
    batches = [(row["batch"], row["tokens"]) for row in found["tables"]["decode steps"]]
    assert batches == [(2, 256)] * 2 + [(1, 320)] * 2


def test_the_drafts_stage_passes_in_a_dry_run(monkeypatch, tmp_path):
    monkeypatch.setattr(serving, "engine_pair", in_process_pair)
    found = run_stage("drafts", drafts, drafts.run, monkeypatch, tmp_path)
    checks = checks_of(found)
    for engine in ("vLLM", "plugin"):
        assert checks[f"{engine}: outputs that drafts change"]["figure"] == 0
        assert checks[f"{engine}: accepted drafts"]["result"] == "pass"
    assert checks["plugin: prompts compressed with drafts"]["figure"] == 2
    assert {row["equal_tokens"] for row in found["tables"]["outputs with drafts"]} == {1.0}
    assert [row["batch"] for row in found["tables"]["decode steps"]] == [2, 2]
