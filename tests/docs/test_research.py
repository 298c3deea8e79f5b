"""docs/research.md works as printed: the package with its scorer, and its programs."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import methods_reference as reference
from added_methods import installed, write_package
from checkpoints import make, tokens
from engines import BLOCK, engine, settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.entry_points import GROUP
from vllm_kvcompress.methods.registry import SCORERS
from vllm_kvcompress.offline import compress
from vllm_kvcompress.settings.config import CompressionConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "research.md").read_text()
FILES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))
SCORER = "kvcompress_vatp.py"
PROJECT = "pyproject.toml"
PROGRAMS = ("compress.py", "try_vatp.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the installed package and the programs of the page."""
    folder = tmp_path_factory.mktemp("site")
    project = tomllib.loads(FILES[PROJECT])["project"]
    entries = project["entry-points"][GROUP]
    write_package(folder, entries, FILES[SCORER], project["name"], project["version"])
    for name in PROGRAMS:
        (folder / name).write_text(FILES[name])
    return folder


@pytest.fixture
def vatp(site) -> Iterator[type]:
    """The scorer of the page, installed for this process."""
    with installed(site):
        yield SCORERS["vatp"]


def run(site: Path, *command: str, folder: Path | None = None) -> str:
    env = {"PYTHONPATH": f"{site}:{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    options = dict(capture_output=True, text=True, cwd=folder or site, env=env)
    done = subprocess.run(command, **options, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_a_package_and_two_programs():
    assert set(FILES) == {SCORER, PROJECT, *PROGRAMS}


def test_a_scorer_takes_fewer_than_40_lines():
    shown = [FILES[name] for name in (SCORER, PROJECT, "try_vatp.py")]
    assert len([line for text in shown for line in text.splitlines() if line.strip()]) < 40


def test_the_first_program_compresses_plain_tensors(site):
    output = run(site, sys.executable, "compress.py").splitlines()
    total, largest = map(int, re.findall(r"\d+", output[0]))
    assert total == 4 * 150  # exactly the budget
    assert 150 < largest < 600
    first = int(output[1].split("torch.Size([2, ")[1].split("]")[0])
    assert output[1] == f"torch.Size([2, {first}]) torch.Size([2, {first}, 64])"


def test_the_new_scorer_works_by_name_and_keeps_large_values(site):
    output = dict(
        line.split(" keeps ") for line in run(site, sys.executable, "try_vatp.py").splitlines()
    )
    assert output["vatp"] == "80 of 80 large values"
    assert int(output["snapkv"].split()[0]) < 40


def test_the_new_file_passes_the_linter(site):
    config = ["--no-cache", "--config", str(ROOT / "pyproject.toml"), str(site / SCORER)]
    run(site, sys.executable, "-m", "ruff", "check", *config, folder=ROOT)
    run(site, sys.executable, "-m", "ruff", "format", "--check", *config, folder=ROOT)


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_the_scorer_computes_the_formula_of_the_page(vatp, power):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 4, 90, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, 90, 16, generator=generator)
    policy = {"scorer": "vatp", "scorer_params": {"power": power}, "window": 8}
    kept = compress(q, k, v, policy=policy, budget=30, page_size=4)
    weights = reference.attention(q[0].double().numpy(), k[0].double().numpy(), range(82, 90))
    expected = np.zeros((2, 82))
    for group in range(2):
        for j in range(82):
            received = weights[2 * group : 2 * group + 2, :, j].sum() / 2
            expected[group, j] = received * sum(abs(v[0, group, j].double().numpy())) ** power
    torch.testing.assert_close(
        kept.scores[0][:, :82], torch.from_numpy(expected).float(), rtol=1e-4, atol=1e-6
    )


def test_parameters_of_the_scorer_are_checked(vatp):
    assert CompressionConfig.parse({"scorer": "vatp"}).method.scorer == vatp(power=1.0)
    with pytest.raises(ConfigError, match=r"'pwoer'.*did you mean 'power'"):
        CompressionConfig.parse({"scorer": "vatp", "scorer_params": {"pwoer": 2}})


@pytest.mark.engine
def test_the_scorer_runs_in_the_engine(vatp, tmp_path):
    """A prompt of 300 tokens keeps the pages of its budget, and other tokens than with SnapKV."""
    prompt, outputs = tokens(300, seed=5), {}
    budget = 3 * BLOCK + 300 % BLOCK  # three pages per layer and the tail
    for scorer in ("vatp", "snapkv"):
        chosen = settings("custom", budget, scorer=scorer, usage=True)
        with engine(make("llama-gqa", tmp_path), additional_config=chosen) as llm:
            (output,) = llm.outputs([prompt], 12)
            assert len(output.outputs[0].token_ids) == 12
            outputs[scorer] = output
    kept = outputs["vatp"].kv_compress
    assert kept["prompt_tokens"] == 300
    assert kept["layer_tokens"] == [budget] * 4
    assert outputs["vatp"].outputs[0].token_ids != outputs["snapkv"].outputs[0].token_ids
