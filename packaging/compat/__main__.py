"""Run the tests that vLLM can change on the versions of vLLM that the lock does not pin.

    make compat                 # or: python packaging/compat
    make compat VLLM=0.33.0     # one of them

Ends with a table, and with status 1 unless every test passed on every version.
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

# One of every minor version that the plugin accepts, but the lock's, on which `make test` runs.
VERSIONS = ("0.31.0", "0.33.0")

# The engine on both model runners, the server, and the command that looks into one and counts its
# blocks. Kernels, policies, plans and manifests are left out: they import nothing of vLLM.
TESTS = ("tests/engine", "tests/e2e", "tests/cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What pytest counted on one version of vLLM.

    Args:
        vllm: the version.
        build: what vLLM it was, or why there was none.
        passed, failed, skipped: tests; an error counts as failed.
        status: pytest's exit status, None where it was not run.
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


def run_tests(made: Environment, tests: list[str], folder: Path) -> Result:
    """Run pytest in an environment, as `make test` does; its output goes where ours goes.

    Args:
        tests: files and folders, or anything else that pytest takes.
        folder: where pytest's results and vLLM's cache of this version are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / f"results-{made.vllm}.xml"
    results.unlink(missing_ok=True)
    command = [
        made.python,
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
    own = {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{made.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(made.folder),
        "VLLM_CACHE_ROOT": str(folder / f"cache-{made.vllm}"),
    }
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, check=False).returncode
    return Result(vllm=made.vllm, build=described(made), status=status, **counts(results))


def counts(results: Path) -> dict[str, int]:
    """Passed, failed and skipped tests of a JUnit file of pytest's, zeros without one."""
    if not results.is_file():
        return {}
    (suite,) = ET.parse(results).getroot().iter("testsuite")
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def described(made: Environment) -> str:
    """What an environment has, with what is older there than its vLLM asks for."""
    return "; ".join([made.build, *made.older])


def show(results: list[Result], console: Console) -> None:
    """Print the table."""
    table = Table("vLLM", "passed", "failed", "skipped", "what ran")
    for result in results:
        tests = (result.passed, result.failed, result.skipped)
        cells = map(str, tests) if result.status is not None else "-" * len(tests)
        table.add_row(result.vllm, *cells, result.build)
    console.print(table)


def version(text: str) -> str:
    """A version of vLLM, as it is typed.

    Raises:
        ArgumentTypeError: it is none, or one that the plugin refuses.
    """
    try:
        given = Version(text)
    except InvalidVersion:
        given = None
    if given is None or given not in accepted():
        raise argparse.ArgumentTypeError(
            f"must be a version of vLLM in {accepted()}, got {text!r}; widen the cuda extra in"
            " pyproject.toml and TESTED in engine/startup/vllm_hook.py to try another"
        )
    return str(given)


def main() -> None:
    parser = argparse.ArgumentParser(prog="compat", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--vllm", action="append", type=version, help=f"one of them; may be repeated; {VERSIONS}"
    )
    parser.add_argument("--base", type=Path, default=ROOT / ".venv", help="the lock's environment")
    parser.add_argument("tests", nargs="*", default=TESTS, help="what pytest runs")
    args = parser.parse_args()
    console, base, made_in = Console(), args.base.absolute(), ROOT / ".cache" / "compat"
    results = []
    for asked in args.vllm or VERSIONS:
        console.print(f"vLLM {asked}: building its environment ...")
        try:
            made = build(asked, base, made_in / asked)
        except BuildError as e:
            results.append(Result(vllm=asked, build=str(e)))
            continue
        console.print(f"vLLM {asked}: {described(made)}")
        if made.build != OVERLAY and Version(asked) > Version(locked()):
            console.print(f"vLLM {asked} has a CPU build: requirements/cpu.lock can move to it.")
        results.append(run_tests(made, list(args.tests), made_in))
    show(results, console)
    sys.exit(0 if all(result.ok for result in results) else 1)


if __name__ == "__main__":
    main()
