"""The version stands in ``pyproject.toml``; whatever else names it must agree."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vllm_kvcompress
from vllm_kvcompress import __version__
from vllm_kvcompress.cli import main
from vllm_kvcompress.engine.startup import import_failures

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# What cannot derive it: tags of our images in manifests and documents, and the images' labels.
IMAGE = re.compile(r"\b(\d+\.\d+\.\d+[\w.]*)-(?:cuda|cpu)\b")
LABEL = re.compile(r'org\.opencontainers\.image\.version="([^"]*)"')
NAMED = re.compile(r"vllm-kvcompress (\d[\w.]*)")


def texts(*folders: str) -> dict[Path, str]:
    kinds = {".md", ".yaml", ".env", ".cpu", ".cuda"}
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    return {file: file.read_text() for file in files if file.suffix in kinds}


def found(pattern: re.Pattern[str], *folders: str) -> dict[str, set[str]]:
    """Every version that matches, by file."""
    every = {str(path): set(pattern.findall(text)) for path, text in texts(*folders).items()}
    return {path: versions for path, versions in every.items() if versions}


def test_the_package_says_what_is_installed():
    """Where this fails after a change of the version, `make setup` installs it again."""
    assert __version__ == VERSION


def test_another_attribute_is_missing_as_usual():
    with pytest.raises(AttributeError, match="'vllm_kvcompress' has no attribute 'version'"):
        vllm_kvcompress.version  # noqa: B018


@pytest.mark.parametrize(
    ("pattern", "folders", "files"),
    [
        (IMAGE, ("deploy", "docker"), 9),
        (LABEL, ("docker",), 2),
        (NAMED, ("docs",), 1),
    ],
    ids=["image tags", "image labels", "documents"],
)
def test_whatever_names_it_agrees(pattern, folders, files):
    versions = found(pattern, *folders)
    assert len(versions) >= files, versions
    assert {path: named for path, named in versions.items() if named != {VERSION}} == {}


def test_the_changelog_has_its_section():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1].split(" ")[0] == VERSION


def typed(monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", ["kvcompress", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return capsys.readouterr().out


def test_the_command_says_it_and_that_of_vllm(monkeypatch, capsys):
    monkeypatch.setattr(import_failures, "version", lambda build: {"vllm": "0.32.0+cpu"}[build])
    assert typed(monkeypatch, capsys) == f"vllm-kvcompress {VERSION}, vLLM 0.32.0+cpu\n"


def test_the_command_says_that_there_is_no_vllm(monkeypatch, capsys):
    def nowhere(build):
        raise import_failures.PackageNotFoundError(build)

    monkeypatch.setattr(import_failures, "version", nowhere)
    assert typed(monkeypatch, capsys) == f"vllm-kvcompress {VERSION}, vLLM not installed\n"


def test_the_command_imports_neither_vllm_nor_torch():
    program = (
        "import sys; sys.argv = ['kvcompress', '--version']\n"
        "from vllm_kvcompress.cli import main\n"
        "try: main()\n"
        "finally: print(*sorted({'torch', 'vllm'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    said, imported = done.stdout.splitlines()
    assert said.startswith(f"vllm-kvcompress {VERSION}, vLLM ")
    assert imported == ""
