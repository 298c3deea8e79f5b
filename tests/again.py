"""Test files once more, in a process of their own with another environment."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Again:
    """What one pytest process said of all its files.

    Args:
        passed: by file, tests that passed.
        ok: whether nothing failed.
        said: the end of its output.
    """

    passed: Mapping[str, int]
    ok: bool
    said: str


def run(files: Sequence[str], environment: Mapping[str, str], folder: Path) -> Again:
    """Run pytest on all files in one process: what they import is imported once.

    With one thread, and nothing beside it: a worker of the suite waits for it, and has one core.

    Args:
        folder: where its report may lie.
    """
    report = folder / "again.xml"
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=15"]
    done = subprocess.run(
        [*line, "-o", "junit_family=xunit1", f"--junit-xml={report}", *files],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout[-8000:] + done.stderr[-2000:]
    passed = dict.fromkeys(files, 0)
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            if not {child.tag for child in case} & {"failure", "error", "skipped"}:
                passed[case.attrib["file"]] += 1
    return Again(passed=passed, ok=done.returncode == 0, said=said)
