"""Whether an image is whole: run at the end of its build, so that it fails there and not at start.

    python verify.py cpu | cuda

Imports neither vLLM nor torch: no GPU is there while an image is built.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "vllm-kvcompress"
PICTURES = "pictures"
"""The extra that both images have."""


def problems(build: str) -> Iterator[str]:
    """One sentence for everything that is missing from this Python's environment.

    Args:
        build: "cpu" or "cuda", the extra that names the vLLM to be there.
    """
    yield from _unmet(PACKAGE, (build, PICTURES))
    # Of what it needs, the CUDA image takes what its base has, in whatever version.
    yield from _unmet("matplotlib", ("",))
    if "kvcompress" not in entry_points(group="vllm.general_plugins").names:
        yield "vLLM must find the plugin `kvcompress` and does not; install the package again"
    for command in ("vllm", "kvcompress"):
        if not Path(sys.executable).with_name(command).is_file():
            yield f"the command `{command}` must lie beside {sys.executable} and does not"


def _unmet(package: str, extras: Sequence[str]) -> Iterator[str]:
    try:
        texts = requires(package) or []
    except PackageNotFoundError:
        # Whoever asks for it has said so.
        return
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield f"{package} needs {requirement.name}{requirement.specifier}, which is missing"
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{package} needs {requirement.name}{requirement.specifier}, got {found}"


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in {"cpu", "cuda"}:
        raise SystemExit(f"verify.py needs the build, cpu or cuda; got {arguments}")
    if found := list(problems(arguments[0])):
        raise SystemExit("verify.py: this image cannot serve: " + "; ".join(found))


if __name__ == "__main__":
    main(sys.argv[1:])
