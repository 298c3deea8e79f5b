"""Stage `correctness`: run the kernel tests on this GPU before any kernel is timed.

Runs ``python -m pytest -m gpu tests/kernels``. A dry run runs a few tests in Triton's interpreter.
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
DRY_TESTS = ("tests/kernels/test_run_on_device.py",)
REQUIRED_PACKAGES = ("pytest", "pytest_timeout", "hypothesis")


def run(report: Report, device: torch.device) -> None:
    missing = [name for name in REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        report.failed("the kernel tests", f"not installed: {', '.join(missing)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        junit_file = Path(folder) / "tests.xml"
        line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        line += [f"--junit-xml={junit_file}", *(DRY_TESTS if report.dry else TESTS)]
        done = subprocess.run(line, cwd=ROOT, stdout=sys.stderr, check=False)
        if not junit_file.exists():
            report.failed("the kernel tests", f"pytest ended with {done.returncode}; see the log")
            return
        report_tests(report, junit_file)


def report_tests(report: Report, junit_file: Path) -> None:
    """Report the counts of passed and skipped tests per file, and each failed test."""
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(junit_file).iter("testcase"):
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
