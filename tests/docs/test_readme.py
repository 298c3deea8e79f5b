"""README is short, its commands and its request run as printed, and its figures are measured."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from checkpoints import text_checkpoint
from forks import serve_forking
from vllm_kvcompress.cli import app
from vllm_kvcompress.engine.startup.cli_args import add_flags
from vllm_kvcompress.methods.registry import RECOMMENDED_BUDGETS, RECOMMENDED_MEMORY
from vllm_kvcompress.settings.config import CompressionConfig

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
URL = "http://127.0.0.1:8000"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
SETTINGS = ("Safe", "Balanced", "Small", "16 bits")
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
    offered = [settings([*common, *shlex.split(cells(name)[0].strip("`"))]) for name in SETTINGS]
    budgets = [(config.budget, config.resolved_packed_dtype) for config in offered]
    assert budgets == [*((b, "k4v3") for b in RECOMMENDED_BUDGETS.values()), (0.2, "auto")]
    assert {config.compress for config in offered} == {"cake-chunk"}


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md"])
def test_the_kvcompress_commands_exist_with_their_options(page):
    found = commands((ROOT / page).read_text(), "kvcompress")
    assert len(found) > 2
    click = typer.main.get_command(app)
    for name, *arguments in found:
        if name in click.commands:
            numbers = ["1" if word == "TOKENS" else word for word in arguments]
            click.commands[name].make_context(name, numbers)
        else:
            assert name == "--version"


# -- figures ------------------------------------------------------------------------------------


def test_memory_and_speed_match_the_linked_run():
    run = json.loads((RESULTS / "engine_cpu_6000_k4v3.json").read_text())
    off, on = run["configurations"]["off"], run["configurations"]["k4v3"]
    memory = [f"{side['blocks_in_use'] * side['block_tokens'] / 128:.0f}" for side in (off, on)]
    speed = [f"{side['decode_step_ms']:.0f} ms" for side in (off, on)]
    assert cells("**Memory:**")[:2] == memory
    assert cells("**Speed:**")[:2] == speed
    assert f"adds {run['ratios']['k4v3_share_of_prefill']:.1%}".replace("%", " %") in README
    assert run["shapes"]["budget"] == RECOMMENDED_BUDGETS["small"]


def test_concurrency_matches_the_linked_run():
    servers = json.loads((RESULTS / "concurrency_cpu_1500.json").read_text())["servers"]
    names = ("vLLM alone", "look-ahead, preemption")
    means = [f"{servers[name][0]['running_mean']:.1f}" for name in names]
    assert cells("**Concurrency:**")[:2] == means


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_match_the_table_of_cache_formats(name):
    """That table is tested against the raw results (test_measurements.py)."""
    flags, memory, quality = cells(name)
    (budget,) = re.findall(r"--kv-budget ([\d.]+)", flags)
    cache = "**k4v3**" if "k4v3" in flags else "16 bits"
    page = (ROOT / "docs" / "measurements.md").read_text()
    (line,) = re.findall(
        rf"^\| {re.escape(cache)} \| {float(budget):.0%} \|.*$".replace("%", " %"),
        page,
        re.MULTILINE,
    )
    _, _, _, share, *positions, _ = [cell.strip() for cell in line.split("|")]
    assert memory == f"{float(share) * 100:.0f} %"
    if name.lower() in RECOMMENDED_MEMORY:
        assert float(share) == RECOMMENDED_MEMORY[name.lower()]
    if name == "Small":
        assert cells("**Quality, a loss:**")[1] == quality
    assert quality == min((cell.split(",")[0] for cell in positions), key=lambda x: float(x[:-2]))


def test_the_h200_figures_match_the_linked_run():
    checks = json.loads((RESULTS / "gpu_h200_serving.json").read_text())["checks"]
    figures = {check["name"]: check["figure"] for check in checks}
    assert round(108 / 17, 4) == figures["108 requests of 8192, one pool: most_at_once, times"]
    delay = figures["1 x 8192: first token, budget 0.1"] - 1
    assert "108 requests at once, not 17" in README
    assert f"{delay * 100:.1f} % later" in README


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
