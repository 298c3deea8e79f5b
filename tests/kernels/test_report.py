"""The kernel report: it compiles for NVIDIA GPUs without having one, and finds regressions."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcompress_kernels.compiled_table import Compiled, differences, numbers, section, sections

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="interpreted kernels do not compile")
def test_kernels_compile_for_hopper_as_in_the_committed_table():
    command = [sys.executable, "-m", "kvcompress_kernels.report_triton", "--sm", "90", "--once"]
    done = subprocess.run(
        [*command, "--check", "kernels/compiled.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert numbers(done.stdout)


def figures(registers):
    return Compiled(registers=registers, shared=0, spills=0, loads_16=4, tensor=0, instructions=64)


SECTION = section(
    "3.9.0",
    (80, 90),
    {"fold": {80: figures(30), 90: figures(32)}, "fp8": {90: figures(40)}},
)


def test_table_is_parsed_without_missing_builds():
    assert numbers(SECTION) == {
        ("fold", 80): ("30", "0", "0", "4", "0", "64"),
        ("fold", 90): ("32", "0", "0", "4", "0", "64"),
        ("fp8", 90): ("40", "0", "0", "4", "0", "64"),
    }
    assert sections("# Title\n\n" + SECTION + "\n## Triton 3.6.0: sm_90\n") == {
        "3.9.0": SECTION,
        "3.6.0": "## Triton 3.6.0: sm_90\n",
    }


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        ({"fold": {90: figures(32)}, "fp8": {90: figures(40)}}, []),
        ({"fold": {90: figures(33)}, "fp8": {90: figures(40)}}, ["fold, sm_90: 32, 0"]),
        ({"fp8": {90: figures(40)}}, ["fold, sm_90: 32, 0"]),
    ],
)
def test_differences_name_build_and_architecture(committed, expected):
    part = section("3.9.0", (90,), {"fold": {90: figures(32)}, "fp8": {90: figures(40)}})
    lines = differences(part, section("3.9.0", (80, 90), committed), report_missing=True)
    assert [line[: len(expected[0])] for line in lines] == expected


def test_missing_table_is_reported():
    lines = differences(SECTION, "", report_missing=True)
    assert "no table of this Triton version" in lines[0]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"spills": 1}, "1 spills"),
        ({"loads_16": 0}, "no 16-byte loads"),
        ({"tensor": 0}, "no tensor cores"),
        ({"shared": 228 << 10}, "bytes of shared memory"),
    ],
)
def test_compiler_faults_are_reported(change, fault):
    from kvcompress_kernels.report_triton import builds_by_name, faults

    build = builds_by_name(90)["window_scores plain D128 w32"]
    good = Compiled(registers=99, shared=1024, spills=0, loads_16=8, tensor=8, instructions=64)
    problems = faults(build, 90, dataclasses.replace(good, **change))
    assert problems == [] if fault is None else fault in problems[0]


def test_missing_build_is_reported_if_all_were_built():
    part = section("3.9.0", (90,), {"fold": {90: figures(32)}})
    assert differences(part, SECTION, report_missing=False) == []
    assert differences(part, SECTION, report_missing=True) == [
        "fp8, sm_90: none now, 40, 0, 0, 4, 0, 64 in the committed table"
    ]
