"""README is short, its commands and its request run as printed, and its figures are measured."""

import argparse
import json
import re
import shlex
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import text_checkpoint
from forks import serve_forking
from vllm_kvcompress.engine.startup.cli_args import add_flags
from vllm_kvcompress.methods.registry import RECOMMENDED_BUDGETS, RECOMMENDED_MEMORY
from vllm_kvcompress.settings.config import CompressionConfig

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
URL = "http://127.0.0.1:8000"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
SHARES = ("28 %", "18 %", "14 %", "22 %")


def mean_end_s(side: dict[str, Any]) -> float:
    """Return the mean seconds until a request of one server was done."""
    return statistics.mean(reply["end_s"] for reply in side["replies"])


GAINS: dict[str, Callable[[dict[str, Any]], str]] = {
    "Requests that ran at once": lambda side: f"{side['mean_running']:.1f}",
    "Time until all were done": lambda side: f"{side['wall_s']:.0f} s",
    "**A loss:** mean time": lambda side: f"{mean_end_s(side):.0f} s",
    "Output tokens per second": lambda side: f"{side['tokens_per_s']:.1f}",
    "KV blocks of a running request": lambda side: f"{side['blocks_per_request']:.1f}",
}
(REQUEST,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands(page: str, program: str) -> list[list[str]]:
    """Return the arguments of all commands of `program` on a page, without comments."""
    lines = re.findall(rf"(?:^    (?:\$ )?|`)({program} [^`\n]+)", page, re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def settings(arguments: list[str]) -> CompressionConfig:
    """Return the settings of a ``vllm serve`` command; arguments of vLLM itself are errors."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("command")
    parser.add_argument("model")
    add_flags(parser)
    parsed = vars(parser.parse_args(arguments))
    ours = {key.removeprefix("kv_"): value for key, value in parsed.items() if key[:3] == "kv_"}
    return CompressionConfig.parse({key: value for key, value in ours.items() if value is not None})


def cells(first: str) -> list[str]:
    """Return the other cells of the only table row whose first cell starts with `first`."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {first}")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 90
    assert len(README.split()) <= 900
    code = re.findall(r"^```.*?^```$", README, re.MULTILINE | re.DOTALL)
    assert max(map(len, set(lines) - set("\n".join(code).splitlines()))) <= 110
    assert any("vllm serve" in line for line in lines[:25])


def test_the_serve_commands_use_existing_flags():
    (first, common) = commands(README, "vllm")
    assert settings(first).budget == 0.2
    offered = [
        settings([*common, *shlex.split(re.findall(r"`(.*?)`", cells(share)[0])[0])])
        for share in SHARES
    ]
    budgets = [(config.budget, config.resolved_packed_dtype) for config in offered]
    assert budgets == [*((b, "k4v3") for b in RECOMMENDED_BUDGETS.values()), (0.2, "auto")]
    assert {config.compress for config in offered} == {"cake-chunk"}


# -- figures ------------------------------------------------------------------------------------


def test_the_gains_are_of_one_run_of_the_demo_with_the_recommended_setting():
    run = json.loads((RESULTS / "demo.json").read_text())
    (first, _) = commands(README, "vllm")
    flags = [word for word in run["flags"]["on"] if word not in run["flags"]["off"]]
    assert flags[:4] == first[2:6]
    both = run["at_once"]
    off, on = both["off"], both["on"]
    assert f"{len(off['replies'])} prompts" in README
    assert f"a pool for {run['pool']['fit_uncompressed']} uncompressed requests" in README
    for row, figure in GAINS.items():
        assert cells(row) == [figure(off), figure(on)], row
    tokens = sum(each["tokens"] for each in both["agreements"])
    assert cells("**A loss:** output tokens before") == [f"{tokens}", f"{both['equal']}"]
    single = [run["question"][side]["replies"][0] for side in ("off", "on")]
    token_s = [
        (each["end_s"] - each["first_token_s"]) / (len(each["token_ids"]) - 1) for each in single
    ]
    assert cells("**A loss:** an output token") == [f"{each * 1000:.0f} ms" for each in token_s]


@pytest.mark.parametrize("share", SHARES)
def test_the_settings_match_the_table_of_cache_formats(share):
    """That table is tested against the raw results (test_measurements.py)."""
    flags, quality = cells(share)
    (budget,) = re.findall(r"--kv-budget ([\d.]+)", flags)
    cache = "**k4v3**" if "k4v3" in flags else "16 bits"
    page = (ROOT / "docs" / "measurements.md").read_text()
    (line,) = re.findall(
        rf"^\| {re.escape(cache)} \| {float(budget):.0%} \|.*$".replace("%", " %"),
        page,
        re.MULTILINE,
    )
    _, _, _, measured, outputs, match, *_ = [cell.strip() for cell in line.split("|")]
    assert share == f"{float(measured) * 100:.0f} %"
    assert f"{outputs} outputs" in README
    assert quality == match
    if "k4v3" in flags:
        assert float(measured) in RECOMMENDED_MEMORY.values()


# -- the request --------------------------------------------------------------------------------


@pytest.mark.engine
def test_the_request_is_compressed_by_the_server(demo_model, tmp_path, monkeypatch, capsys):
    (_, _, *flags), *_ = commands(README, "vllm")
    flags += ["--served-model-name", MODEL, "--enforce-eager", "--max-model-len", "2560"]
    model = text_checkpoint(tmp_path, demo_model)
    monkeypatch.chdir(ROOT)
    with serve_forking(model, [*flags, "--dtype", "float32"], tmp_path) as server:
        exec(REQUEST.replace(URL, server.url), {})
        printed = capsys.readouterr().out
        usage = re.search(r"^\{'method'.*\}$", printed, re.MULTILINE)[0]
        kept, tokens = (
            float(re.search(rf"'{key}': ([\d.]+)", usage)[1])
            for key in ("kept_tokens", "prompt_tokens")
        )
        assert 0.15 < kept / tokens < 0.25
