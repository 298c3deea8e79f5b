"""Check that an image is complete, at the end of its build instead of at its first start.

    python verify.py cpu | cuda

Imports neither vLLM nor torch, because there is no GPU during an image build.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "vllm-kvcompress"
PICTURES = "pictures"
"""The extra that both images install."""


def problems(build: str) -> Iterator[str]:
    """Yield one sentence per package, plugin or command that this environment lacks.

    Args:
        build: "cpu" or "cuda", the extra that requires vLLM.
    """
    yield from _unmet(PACKAGE, (build, PICTURES))
    # In the CUDA image, dependencies of matplotlib keep the versions of the base image.
    yield from _unmet("matplotlib", ("",))
    if "kvcompress" not in entry_points(group="vllm.general_plugins").names:
        yield "vLLM does not find the plugin `kvcompress`: install the package again"
    for command in ("vllm", "kvcompress"):
        if not Path(sys.executable).with_name(command).is_file():
            yield f"the command `{command}` is not in the folder of {sys.executable}"


def _unmet(package: str, extras: Sequence[str]) -> Iterator[str]:
    try:
        texts = requires(package) or []
    except PackageNotFoundError:
        # The package that requires it has already reported it.
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
        raise SystemExit(f"usage: verify.py cpu | cuda, got {arguments}")
    if found := list(problems(arguments[0])):
        raise SystemExit("verify.py: this image is incomplete: " + "; ".join(found))


if __name__ == "__main__":
    main(sys.argv[1:])
