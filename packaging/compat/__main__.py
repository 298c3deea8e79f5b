"""Run the tests that depend on vLLM with the vLLM versions that the lock does not pin.

    make compat                 # or: python packaging/compat
    make compat VLLM=0.33.0     # one version only

Prints a table. The exit status is 1 unless all tests passed on all versions.
"""

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from environments import OVERLAY, ROOT, BuildError, Environment, accepted, build, locked
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.table import Table

# One per minor version that the plugin accepts. `make test` covers the version in the lock.
VERSIONS = ("0.31.0", "0.33.0")

# Tests of the engine on both model runners, of the server, and of the commands that start one.
# Kernels, methods, planning and manifests do not import vLLM, so their tests are left out.
TESTS = ("tests/engine", "tests/e2e", "tests/cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Test results on one version of vLLM.

    Args:
        vllm: the version.
        build: the build of vLLM, or the reason why it could not be built.
        passed, failed, skipped: numbers of tests; an error counts as failed.
        status: exit status of pytest; None if it did not run.
    """

    vllm: str
    build: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    status: int | None = None

    @property
    def ok(self) -> bool:
        return self.status == 0 and self.passed > 0


def run_tests(environment: Environment, tests: list[str], folder: Path) -> Result:
    """Run pytest in an environment with the options of `make test`.

    Args:
        tests: files and folders, or other arguments of pytest.
        folder: folder for pytest's results and for vLLM's cache of this version.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / f"results-{environment.vllm}.xml"
    results.unlink(missing_ok=True)
    command = [
        environment.python,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--junit-xml={results}",
        "--numprocesses",
        "2",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        *tests,
    ]
    variables = {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(environment.folder),
        "VLLM_CACHE_ROOT": str(folder / f"cache-{environment.vllm}"),
    }
    status = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, check=False
    ).returncode
    return Result(
        vllm=environment.vllm, build=describe(environment), status=status, **counts(results)
    )


def counts(results: Path) -> dict[str, int]:
    """Return the passed, failed and skipped tests of a JUnit file; empty without a file."""
    if not results.is_file():
        return {}
    (suite,) = ET.parse(results).getroot().iter("testsuite")
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def describe(environment: Environment) -> str:
    """Describe the vLLM build of an environment and packages older than it requires."""
    return "; ".join([environment.build, *environment.older])


def show(results: list[Result], console: Console) -> None:
    """Print the table."""
    table = Table("vLLM", "passed", "failed", "skipped", "build")
    for result in results:
        tests = (result.passed, result.failed, result.skipped)
        cells = map(str, tests) if result.status is not None else "-" * len(tests)
        table.add_row(result.vllm, *cells, result.build)
    console.print(table)


def version(text: str) -> str:
    """Parse a version of vLLM.

    Raises:
        ArgumentTypeError: `text` is not a version, or the plugin does not accept it.
    """
    try:
        parsed = Version(text)
    except InvalidVersion:
        parsed = None
    if parsed is None or parsed not in accepted():
        raise argparse.ArgumentTypeError(
            f"must be a version of vLLM in {accepted()}, got {text!r}; to try another one, widen"
            " the cuda extra in pyproject.toml and TESTED in engine/startup/vllm_hooks.py"
        )
    return str(parsed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="compat", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--vllm",
        action="append",
        type=version,
        help=f"version to test, repeatable (default: {', '.join(VERSIONS)})",
    )
    parser.add_argument(
        "--base", type=Path, default=ROOT / ".venv", help="environment made from the lock"
    )
    parser.add_argument("tests", nargs="*", default=TESTS, help="arguments for pytest")
    args = parser.parse_args()
    console, base, cache = Console(), args.base.absolute(), ROOT / ".cache" / "compat"
    results = []
    for vllm in args.vllm or VERSIONS:
        console.print(f"vLLM {vllm}: building its environment ...")
        try:
            environment = build(vllm, base, cache / vllm)
        except BuildError as e:
            results.append(Result(vllm=vllm, build=str(e)))
            continue
        console.print(f"vLLM {vllm}: {describe(environment)}")
        if environment.build != OVERLAY and Version(vllm) > Version(locked()):
            console.print(f"vLLM {vllm} has a CPU build: requirements/cpu.lock can move to it.")
        results.append(run_tests(environment, list(args.tests), cache))
    show(results, console)
    sys.exit(0 if all(result.ok for result in results) else 1)


if __name__ == "__main__":
    main()
