"""Stage `drafts`: EAGLE heads with random weights, with and without the plugin.

First, greedy outputs of the demo model with drafts must equal those without drafts, on both sides.
This head is an EAGLE3 one and drafts only the four tokens that outputs use, so some drafts are
accepted. Then decode steps are timed with drafts of an EAGLE head, without and with compression.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_bench import write_eagle_head
from benchmarks.gpu import tokens
from benchmarks.gpu.engine_process import engine_pair
from benchmarks.gpu.models import DRY as DRY_MODEL
from benchmarks.gpu.report import Report
from benchmarks.gpu.serving import AT_PROMPT_END, turns
from vllm_kvcompress.compare.measures import shared_length

DRAFTS = 3
SETTINGS = {"compress": "cake-chunk", "budget": 0.3}
FOUR_TOKENS = (5, 9, 200, 311)
LENGTHS, DRY_LENGTHS = (260, 900, 1500, 3000), (60, 300, 333)
OUTPUT_TOKENS, DRY_OUTPUT_TOKENS = 96, 24
MARGIN = 0.25
"""Nats. In bfloat16, a step with drafts rounds differently, which may flip smaller margins."""


def run(report: Report, device: torch.device) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if report.dry:
            compare_outputs(report, DRY_MODEL.write(Path(folder)))
        elif (tokens.MODEL / "config.json").exists():
            compare_outputs(report, str(tokens.MODEL))
        else:
            report.failed("the demo model", f"{tokens.MODEL} is missing; run `make model`")
    with turns(report, device, AT_PROMPT_END, drafts=DRAFTS) as found:
        for count, length, rounds in found.sizes.together:
            found.decode_steps(count, length, rounds)


def compare_outputs(report: Report, model: str) -> None:
    """Check that drafts change no greedy output of vLLM and of the plugin."""
    rng, lengths = random.Random(report.seed), DRY_LENGTHS if report.dry else LENGTHS
    prompts = [[rng.randrange(3, 500) for _ in range(length)] for length in lengths]
    backend, mode = tokens.DRY_BACKENDS[0] if report.dry else tokens.DEFAULT
    options = tokens.options(backend, mode, dry=report.dry)
    options["logprobs_mode"] = "processed_logprobs"  # margins between the four tokens
    settings = {**SETTINGS, "min_prompt": tokens.MIN_PROMPT}
    arguments = {
        "prompts": prompts,
        "tokens": DRY_OUTPUT_TOKENS if report.dry else OUTPUT_TOKENS,
        "alone": False,
        "allowed": FOUR_TOKENS,
    }
    if report.dry:
        settings["lookahead"] = 8
    with engine_pair(model, settings, **options) as engines:
        expected = [engine.call("generate", **arguments) for engine in engines]
    with tempfile.TemporaryDirectory() as folder:
        options["speculative_config"] = {
            "method": "eagle3",
            "model": write_eagle_head(model, Path(folder), FOUR_TOKENS),
            "num_speculative_tokens": DRAFTS,
            # A dry run's target has no weights to load.
            "draft_load_config": {"load_format": "auto"},
        }
        with engine_pair(model, settings, **options) as engines:
            for name, engine, outputs in zip(("vLLM", "plugin"), engines, expected, strict=True):
                got = engine.call("generate", **arguments)
                report_same(report, name, outputs, got)
                drafts = engine.call("drafts")
                report.row("drafts", engine=name, **drafts)
                report.check(f"{name}: accepted drafts", drafts["accepted"], (">=", 1))
            compressed = engines[1].call("compressed")
    long = sum(length >= tokens.MIN_PROMPT for length in lengths)
    report.check("plugin: prompts compressed with drafts", compressed, ("==", long))


def report_same(report: Report, name: str, expected: list[Any], got: list[Any]) -> None:
    """Check that outputs differ at most where the two best tokens are nearly equal."""
    share = tokens.equal_tokens(*([each["ids"] for each in side] for side in (expected, got)))
    report.row("outputs with drafts", engine=name, equal_tokens=share)
    clear = 0
    for a, b in zip(expected, got, strict=True):
        index = shared_length(a["ids"], b["ids"])
        clear += index < len(a["ids"]) and a["margins"][index] > (0 if report.dry else MARGIN)
    note = tokens.differences(expected, got)
    report.check(f"{name}: outputs that drafts change", clear, ("==", 0), note=note)
