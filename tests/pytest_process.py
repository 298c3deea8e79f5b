"""Run test files in a separate pytest process with a different environment."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class PytestResult:
    """Results of one pytest process.

    Args:
        passed: number of passed tests by file.
        ok: True if no test failed.
        output: the end of stdout and stderr.
    """

    passed: Mapping[str, int]
    ok: bool
    output: str


def run(files: Sequence[str], environment: Mapping[str, str], folder: Path) -> PytestResult:
    """Run pytest on all files in one process, so that shared imports happen once.

    The process uses one thread and no xdist workers: the calling suite worker has only one core.

    Args:
        files: test files, relative to the repository root, or ids of tests in them.
        environment: added to this process's environment variables.
        folder: where to write the JUnit report.
    """
    report = folder / "again.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=15"]
    command += ["-o", "junit_family=xunit1", f"--junit-xml={report}", *files]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    completed = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    output = completed.stdout[-8000:] + completed.stderr[-2000:]
    passed = dict.fromkeys((file.partition("::")[0] for file in files), 0)
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            if not {child.tag for child in case} & {"failure", "error", "skipped"}:
                passed[case.attrib["file"]] += 1
    return PytestResult(passed=passed, ok=completed.returncode == 0, output=output)
