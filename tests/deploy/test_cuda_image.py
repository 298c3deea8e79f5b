"""The CUDA image's install step, run beside CI's vLLM, and what it has brought there."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

from build_context import copy_context
from fake_vllm import FakeVllm
from loopback import server
from manifests import ROOT

DOCKER = ROOT / "docker"
LOCK = (ROOT / "requirements" / "pictures.lock").read_text()
PICTURES = re.findall(r"^([\w.-]+)==", LOCK, re.MULTILINE)
THERE = "pyparsing"
"""Of that lock, what the official image of this test happens to have, in a version of its own."""


def packages(names):
    """What lies in site-packages for these distributions."""
    files = [file for name in names for file in distribution(name).files or []]
    return {file.parts[0] for file in files} - {"..", "__pycache__"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A Python that has vLLM and what it asks for, as the official image's has, after the step.

    Its folder, its site-packages, and what the step put there.
    """
    folder = tmp_path_factory.mktemp("image") / "python"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = Path(sys.executable).parent.parent / site.relative_to(folder)
    away = packages(PICTURES)
    for found in ours.iterdir():
        if "kvcompress" not in found.name and found.name not in away:
            (site / found.name).symlink_to(found)
    (site / THERE).symlink_to(ours / THERE)
    (site / f"{THERE}-3.0.9.dist-info").mkdir()
    (site / f"{THERE}-3.0.9.dist-info" / "METADATA").write_text(f"Name: {THERE}\nVersion: 3.0.9\n")
    (folder / "bin" / "vllm").symlink_to(Path(sys.executable).with_name("vllm"))
    before = {path.name for path in site.iterdir()}
    source = tmp_path_factory.mktemp("src")
    env = {**os.environ, "PYTHON": str(folder / "bin" / "python"), "HOME": str(source)}
    env.pop("PYTHONPATH", None)
    step = copy_context(source) / "docker" / "install-cuda.sh"
    done = subprocess.run([step], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, site, {path.name for path in site.iterdir()} - before


def test_it_gets_the_plugin_and_matplotlib_and_nothing_else(installed):
    folder, site, new = installed
    plugin = {name for name in new if "kvcompress" in name}
    assert {name.partition("-")[0] for name in plugin} == {"vllm_kvcompress", "kvcompress_kernels"}
    brought = packages(name for name in PICTURES if name != THERE)
    assert "matplotlib" in brought
    assert new - plugin - {"__pycache__"} == brought
    assert (site / f"{THERE}-3.0.9.dist-info").is_dir()
    assert (folder / "bin" / "kvcompress").is_file()


@pytest.fixture
def without_vllm(tmp_path):
    """The environment of a process that cannot import vLLM, nor what is not installed."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "vllm.py").write_text("raise ImportError('no vLLM is here')\n")
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": "first",
            "COLUMNS": "160"}  # fmt: skip


def test_an_installed_compare_needs_no_vllm_and_draws(installed, without_vllm, tmp_path):
    """The wheel's own files: pip has built it from the source and unpacked it."""
    folder, site, _ = installed
    tasks = ROOT / "vllm_kvcompress" / "compare" / "tasks"
    for path in [*tasks.glob("*.py"), *tasks.parent.glob("*.py")]:
        assert (site / path.relative_to(ROOT)).read_text() == path.read_text()
    command = [folder / "bin" / "kvcompress", "compare"]
    run = {"cwd": tmp_path, "env": without_vllm, "capture_output": True, "text": True}
    done = subprocess.run([*command, "--help"], **run)
    assert done.returncode == 0, done.stderr
    assert "--max-drop" in done.stdout
    with server(FakeVllm()) as url:
        flags = [
            "--tasks",
            "niah-single",
            "--count",
            "2",
            "--methods",
            "snapkv",
            "--budgets",
            "0.2",
        ]
        done = subprocess.run([*command, "--url", url, *flags, "--json"], **run)
    assert (done.returncode, json.loads(done.stdout)["complete"]) == (1, True), done.stderr
    picture = tmp_path / "kvcompress-compare" / "report.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_its_last_step_refuses_an_image_that_cannot_serve_or_draw(installed, tmp_path):
    """One with another vLLM, a package that is too old for matplotlib, and no command."""
    shutil.copytree(installed[0], tmp_path / "python", symlinks=True)
    python = tmp_path / "python"
    (site,) = python.glob("lib/python*/site-packages")
    (metadata,) = site.glob("vllm-0*.dist-info")
    text = (metadata / "METADATA").read_text()
    metadata.unlink()
    (site / "vllm-0.40.0.dist-info").mkdir()
    other = site / "vllm-0.40.0.dist-info" / "METADATA"
    other.write_text(text.replace("Version: 0.32.0+cpu", "Version: 0.40.0"))
    old = site / f"{THERE}-3.0.9.dist-info" / "METADATA"
    old.write_text(old.read_text().replace("3.0.9", "2.4.7"))
    shutil.rmtree(next(site.glob("cycler-*")))
    (python / "bin" / "kvcompress").unlink()
    verify = [python / "bin" / "python", DOCKER / "verify.py", "cuda"]
    done = subprocess.run(verify, capture_output=True, text=True)
    assert done.returncode == 1
    assert "vllm-kvcompress needs vllm<0.34,>=0.31, got 0.40.0" in done.stderr
    assert "matplotlib needs pyparsing>=3, got 2.4.7" in done.stderr
    assert "matplotlib needs cycler>=0.10, which is missing" in done.stderr
    assert "the command `kvcompress` must lie beside" in done.stderr
