"""The version is set in ``pyproject.toml``; every other place that names it must agree."""

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
# Image tags in manifests and documents, and image labels, cannot derive the version.
IMAGE = re.compile(r"\b(\d+\.\d+\.\d+[\w.]*)-(?:cuda|cpu)\b")
LABEL = re.compile(r'org\.opencontainers\.image\.version="([^"]*)"')
NAMED = re.compile(r"vllm-kvcompress (\d[\w.]*)")


def texts(*folders: str) -> dict[Path, str]:
    kinds = {".md", ".yaml", ".env", ".cpu", ".cuda"}
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    return {file: file.read_text() for file in files if file.suffix in kinds}


def versions_by_file(pattern: re.Pattern[str], *folders: str) -> dict[str, set[str]]:
    """Return the versions that `pattern` matches, by file; files without a match are left out."""
    matches = {str(path): set(pattern.findall(text)) for path, text in texts(*folders).items()}
    return {path: versions for path, versions in matches.items() if versions}


def test_the_package_reports_the_installed_version():
    """If this fails after a version change, `make setup` reinstalls the package."""
    assert __version__ == VERSION


def test_unknown_attributes_raise_attribute_error():
    with pytest.raises(AttributeError, match="'vllm_kvcompress' has no attribute 'version'"):
        vllm_kvcompress.version  # noqa: B018


@pytest.mark.parametrize(
    ("pattern", "folders", "files"),
    [(IMAGE, ("deploy", "docker"), 9), (LABEL, ("docker",), 2), (NAMED, ("docs",), 1)],
    ids=["image tags", "image labels", "documents"],
)
def test_manifests_labels_and_documents_name_the_version(pattern, folders, files):
    versions = versions_by_file(pattern, *folders)
    assert len(versions) >= files, versions
    assert {path: named for path, named in versions.items() if named != {VERSION}} == {}


def test_the_changelog_has_a_section_for_the_version():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1].split(" ")[0] == VERSION


def version_output(monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", ["kvcompress", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return capsys.readouterr().out


def test_the_command_prints_its_version_and_vllms(monkeypatch, capsys):
    monkeypatch.setattr(import_failures, "version", lambda build: {"vllm": "0.32.0+cpu"}[build])
    assert version_output(monkeypatch, capsys) == f"vllm-kvcompress {VERSION}, vLLM 0.32.0+cpu\n"


def test_the_command_reports_that_vllm_is_not_installed(monkeypatch, capsys):
    def package_not_found(build):
        raise import_failures.PackageNotFoundError(build)

    monkeypatch.setattr(import_failures, "version", package_not_found)
    assert version_output(monkeypatch, capsys) == f"vllm-kvcompress {VERSION}, vLLM not installed\n"


def test_printing_the_version_imports_neither_vllm_nor_torch():
    program = (
        "import sys; sys.argv = ['kvcompress', '--version']\n"
        "from vllm_kvcompress.cli import main\n"
        "try: main()\n"
        "finally: print(*sorted({'torch', 'vllm'} & sys.modules.keys()))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    printed, imported = result.stdout.splitlines()
    assert printed.startswith(f"vllm-kvcompress {VERSION}, vLLM ")
    assert imported == ""
