"""The CUDA image's install step adds the plugin and matplotlib to an existing vLLM."""

import json
import os
import re
import shlex
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
PREINSTALLED = "pyparsing"
"""A package of that lock that the simulated base image already has in another version."""


def site_packages_of(names):
    """Return the entries in site-packages of the distributions `names`."""
    files = [file for name in names for file in distribution(name).files or []]
    return {file.parts[0] for file in files} - {"..", "__pycache__"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A Python environment with vLLM, as in the official image, after the install step.

    Returns its folder, its site-packages folder, and the names that the step added there.
    """
    folder = tmp_path_factory.mktemp("image") / "python"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = Path(sys.executable).parent.parent / site.relative_to(folder)
    not_preinstalled = site_packages_of(PICTURES)
    for found in ours.iterdir():
        if "kvcompress" not in found.name and found.name not in not_preinstalled:
            (site / found.name).symlink_to(found)
    (site / PREINSTALLED).symlink_to(ours / PREINSTALLED)
    (site / f"{PREINSTALLED}-3.0.9.dist-info").mkdir()
    (site / f"{PREINSTALLED}-3.0.9.dist-info" / "METADATA").write_text(
        f"Name: {PREINSTALLED}\nVersion: 3.0.9\n"
    )
    (folder / "bin" / "vllm").symlink_to(Path(sys.executable).with_name("vllm"))
    before = {path.name for path in site.iterdir()}
    source = tmp_path_factory.mktemp("src")
    env = {**os.environ, "PYTHON": str(folder / "bin" / "python"), "HOME": str(source)}
    env.pop("PYTHONPATH", None)
    step = copy_context(source) / "docker" / "install-cuda.sh"
    done = subprocess.run([step], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, site, {path.name for path in site.iterdir()} - before


def test_the_step_adds_only_the_plugin_and_matplotlib(installed):
    folder, site, new = installed
    plugin = {name for name in new if "kvcompress" in name}
    assert {name.partition("-")[0] for name in plugin} == {"vllm_kvcompress", "kvcompress_kernels"}
    added = site_packages_of(name for name in PICTURES if name != PREINSTALLED)
    assert "matplotlib" in added
    assert new - plugin - {"__pycache__"} == added
    assert (site / f"{PREINSTALLED}-3.0.9.dist-info").is_dir()
    assert (folder / "bin" / "kvcompress").is_file()


@pytest.fixture
def without_vllm(tmp_path):
    """Environment variables of a process that cannot import vLLM."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "vllm.py").write_text("raise ImportError('vLLM is not available')\n")
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": "first",
            "COLUMNS": "160"}  # fmt: skip


def test_the_installed_compare_works_without_vllm_and_draws(installed, without_vllm, tmp_path):
    """The wheel that pip built has the same files as the source."""
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
        flags = shlex.split("""
            --tasks niah-single --count 2 --methods snapkv --budgets 0.2 --by agreement
        """)
        done = subprocess.run([*command, "--url", url, *flags, "--json"], **run)
    assert (done.returncode, json.loads(done.stdout)["complete"]) == (1, True), done.stderr
    picture = tmp_path / "kvcompress-compare" / "report.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_verify_rejects_an_incomplete_image(installed, tmp_path):
    """The image has another vLLM, a package too old for matplotlib, and no kvcompress command."""
    shutil.copytree(installed[0], tmp_path / "python", symlinks=True)
    python = tmp_path / "python"
    (site,) = python.glob("lib/python*/site-packages")
    (metadata,) = site.glob("vllm-0*.dist-info")
    text = (metadata / "METADATA").read_text()
    metadata.unlink()
    (site / "vllm-0.40.0.dist-info").mkdir()
    other = site / "vllm-0.40.0.dist-info" / "METADATA"
    other.write_text(text.replace("Version: 0.32.0+cpu", "Version: 0.40.0"))
    old = site / f"{PREINSTALLED}-3.0.9.dist-info" / "METADATA"
    old.write_text(old.read_text().replace("3.0.9", "2.4.7"))
    shutil.rmtree(next(site.glob("cycler-*")))
    (python / "bin" / "kvcompress").unlink()
    verify = [python / "bin" / "python", DOCKER / "verify.py", "cuda"]
    done = subprocess.run(verify, capture_output=True, text=True)
    assert done.returncode == 1
    assert "vllm-kvcompress needs vllm<0.34,>=0.31, got 0.40.0" in done.stderr
    assert "matplotlib needs pyparsing>=3, got 2.4.7" in done.stderr
    assert "matplotlib needs cycler>=0.10, which is missing" in done.stderr
    assert "the command `kvcompress` is not in the folder of" in done.stderr
