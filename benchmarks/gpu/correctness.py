"""Stage `correctness`: the kernels' own tests on this GPU, before any of them is timed.

``python -m pytest -m gpu tests/kernels``; in a dry run a few of them in Triton's interpreter.
"""

import importlib.util
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import torch

from benchmarks.gpu.report import Report

ROOT = Path(__file__).parents[2]
TESTS = ("-m", "gpu", "tests/kernels")
DRY_TESTS = ("tests/kernels/test_carried_ops.py",)
NEEDED = ("pytest", "pytest_timeout", "hypothesis")


def run(report: Report, device: torch.device) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        report.failed("the kernels' tests", f"not installed: {', '.join(missing)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "tests.xml"
        line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        line += [f"--junit-xml={found}", *(DRY_TESTS if report.dry else TESTS)]
        done = subprocess.run(line, cwd=ROOT, stdout=sys.stderr, check=False)
        if not found.exists():
            report.failed("the kernels' tests", f"pytest ended with {done.returncode}; see the log")
            return
        judge(report, found)


def judge(report: Report, found: Path) -> None:
    """Count the tests of a JUnit file by file; one that is skipped shows nothing."""
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(found).iter("testcase"):
        tags = {child.tag for child in case}
        result = "failed" if tags & {"failure", "error"} else "passed"
        result = "skipped" if "skipped" in tags else result
        counts.setdefault(case.attrib["classname"], Counter())[result] += 1
        if result == "failed":
            report.failed(f"{case.attrib['classname']}: {case.attrib['name']}", "see the log")
    for name, results in sorted(counts.items()):
        report.row("tests", of=name, **{kind: results[kind] for kind in ("passed", "skipped")})
    total = sum(counts.values(), Counter())
    report.check("tests that failed", total["failed"], ("==", 0))
    report.check("tests that passed", total["passed"], (">=", 1))
