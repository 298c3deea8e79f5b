"""docs/research.md works as printed: its scorer, its change to the table, and its programs."""

import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import methods_reference as reference
from checkpoints import make, tokens
from engines import BLOCK, engine, settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.registry import SCORERS
from vllm_kvcompress.offline import compress
from vllm_kvcompress.settings.config import CompressionConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "research.md").read_text()
FILES = dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))
(CHANGE,) = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SCORER = "vllm_kvcompress/methods/published/vatp.py"
PROGRAMS = ("compress.py", "try_vatp.py")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources with the changes of the page."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("vllm_kvcompress", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    apply = ["git", "apply", "--verbose", "-"]
    subprocess.run(apply, input=CHANGE, cwd=folder, text=True, check=True)
    return folder


@pytest.fixture
def vatp(monkeypatch) -> type:
    """The scorer of the page, registered in this process."""
    module = types.ModuleType("vatp")
    monkeypatch.setitem(sys.modules, "vatp", module)  # dataclasses look up their module there
    exec(compile(FILES[SCORER], SCORER, "exec"), module.__dict__)
    monkeypatch.setitem(SCORERS, "vatp", module.Vatp)
    return module.Vatp


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
        env={"PYTHONPATH": f"{folder}:{folder / 'kernels'}", "OMP_NUM_THREADS": "1"},
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_a_file_and_two_programs():
    assert set(FILES) == {SCORER, *PROGRAMS}


def test_a_scorer_takes_fewer_than_40_lines():
    shown = [FILES[SCORER], CHANGE, FILES["try_vatp.py"]]
    assert len([line for text in shown for line in text.splitlines() if line.strip()]) < 40


def test_the_first_program_compresses_plain_tensors(checkout):
    output = run(checkout, sys.executable, "compress.py").splitlines()
    total, largest = map(int, re.findall(r"\d+", output[0]))
    assert total == 4 * 150  # exactly the budget
    assert 150 < largest < 600
    first = int(output[1].split("torch.Size([2, ")[1].split("]")[0])
    assert output[1] == f"torch.Size([2, {first}]) torch.Size([2, {first}, 64])"


def test_the_new_scorer_works_by_name_and_keeps_large_values(checkout):
    output = dict(
        line.split(" keeps ") for line in run(checkout, sys.executable, "try_vatp.py").splitlines()
    )
    assert output["vatp"] == "80 of 80 large values"
    assert int(output["snapkv"].split()[0]) < 40


def test_the_new_file_and_the_table_pass_the_linter(checkout):
    changed = [SCORER, "vllm_kvcompress/methods/registry.py"]
    run(checkout, sys.executable, "-m", "ruff", "check", "--no-cache", *changed)
    run(checkout, sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *changed)


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
            received = (
                sum(weights[h, i, j] for h in (2 * group, 2 * group + 1) for i in range(8)) / 2
            )
            expected[group, j] = received * sum(abs(v[0, group, j].double().numpy())) ** power
    torch.testing.assert_close(
        kept.scores[0][:, :82], torch.from_numpy(expected).float(), rtol=1e-4, atol=1e-6
    )


def test_parameters_of_the_scorer_are_checked(vatp):
    assert CompressionConfig.parse({"scorer": "vatp"}).build_scorer() == vatp(power=1.0)
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
