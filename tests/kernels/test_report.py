"""The kernel report: it compiles for NVIDIA GPUs without having one, and finds regressions."""

import dataclasses
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from kvcompress_kernels.compiled_table import (
    NUMBERS,
    Compiled,
    differences,
    numbers,
    section,
    sections,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="interpreted kernels do not compile")
def test_kernels_compile_for_hopper_as_in_the_committed_table():
    command = [sys.executable, "-m", "kvcompress_kernels.report_triton", "--sm", "90", "--once"]
    command += ["--check", "kernels/compiled.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert numbers(done.stdout)


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="interpreted kernels do not compile")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_scoring_a_window_leaves_no_part_of_a_gpu_idle():
    """Two programs share an SM, and keys are loaded while earlier keys are scored."""
    from kvcompress_kernels.report_triton import builds_by_name, compiled

    builds = builds_by_name(90)
    for part, barriers, per_logit in (("plain", 3, 12.0), ("variance", 5, 13.0)):
        kernel = compiled(builds[f"window_scores {part} D128 w32"], 90)
        assert kernel.programs >= 2
        assert kernel.copies_in_flight >= 1
        assert kernel.barriers <= barriers
        assert kernel.per_logit <= per_logit


def test_packed_attention_reads_ahead_and_unpacks_with_few_instructions():
    """A group is copied as seven tiles. `copies_in_flight` counts them."""
    table = numbers(sections((ROOT / "kernels" / "compiled.md").read_text())["3.9.0"])
    rows = {
        key: dict(zip(NUMBERS, figures, strict=True))
        for key, figures in table.items()
        if key[0].startswith("packed_attention")
    }
    assert {sm for _, sm in rows} == {80, 90, 100}
    assert [key for key, row in rows.items() if row["spills"] != "0"] == []
    for group, (sm, per_number) in product((4, 7, 8), {80: 4.1, 90: 4.1, 100: 4.0}.items()):
        row = rows[f"packed_attention D128 G{group}", sm]
        assert int(row["programs"]) >= 3
        assert int(row["barriers"]) <= 8
        assert int(row["copies_in_flight"]) >= 2 * 7
        assert float(row["per_number"]) <= per_number


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="interpreted kernels do not compile")
def test_a_kernel_that_reads_some_rows_of_a_batch_is_compiled_once():
    """Rows start at any multiple of their size. Alignment must not select another compilation."""
    from kvcompress_kernels.report_triton import builds_by_name

    window_scores = ("partials_kernel", "columns_kernel", "pooled_kernel")
    of_rows = {key: {"pages", "lengths"} for key in window_scores}
    of_rows |= {key: {"pages"} for key in ("_norm_kernel", "_spread_kernel", "_cosine_kernel")}
    of_rows |= {key: {"pages", "tokens"} for key in ("join_kernel", "score_kernel")}
    of_rows |= {"log_sum_kernel": {"lengths"}, "_pages_kernel": {"tokens", "caps"}}
    of_rows["_apportion_kernel"] = {"weights", "shift", "totals", "caps"}
    kernels = {build.kernel.fn.__name__: build.kernel for build in builds_by_name(90).values()}
    for name, arguments in of_rows.items():
        parameters = kernels[name].params
        specialised = {x.name for x in parameters if not x.do_not_specialize_on_alignment}
        assert not specialised & arguments, name


def figures(registers):
    counts = dict(registers=registers, shared=0, spills=0, loads_16=4, tensor=0)
    counts |= dict(instructions=64, programs=16, barriers=2)
    return Compiled(**counts, per_logit=None, per_number=None, copies_in_flight=None)


REST = ("0", "0", "4", "0", "64", "16", "2", "none", "none", "none")
"""Figures of `figures` after the registers."""
SECTION = section(
    "3.9.0", (80, 90), {"fold": {80: figures(30), 90: figures(32)}, "fp8": {90: figures(40)}}
)


def test_table_is_parsed_without_missing_builds():
    assert numbers(SECTION) == {
        ("fold", 80): ("30", *REST),
        ("fold", 90): ("32", *REST),
        ("fp8", 90): ("40", *REST),
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
        ({"copies_in_flight": 0}, "no prefetches"),
        ({"copies_in_flight": None}, "no prefetches"),
    ],
)
def test_compiler_faults_are_reported(change, fault):
    from kvcompress_kernels.report_triton import builds_by_name, faults

    build = builds_by_name(90)["window_scores plain D128 w32"]
    good = dataclasses.replace(figures(99), loads_16=8, tensor=8, copies_in_flight=2)
    problems = faults(build, 90, dataclasses.replace(good, **change))
    assert problems == [] if fault is None else fault in problems[0]


LISTING = """
    /*0000*/                   LDG.E R2, [R4.64] ;           /* 0x0000000004027981 */
                                                             /* 0x000ea2000c1e1900 */
    /*0010*/                   FADD R1, R2, R3 ;
    /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
    /*0030*/              @!P0 BRA 0x10 ;
    /*0040*/                   LDGSTS.E.BYPASS.128 [R9], [R6.64] ;
    /*0050*/                   DEPBAR.LE SB0, 0x2 ;
    /*0060*/                   BRA 0x40 ;
    /*0070*/                   FADD R1, R2, R3 ;
    /*0080*/               @P1 BRA 0x70 ;
    /*0090*/                   EXIT ;
    /*00a0*/              @!P0 BRA 0x90 ;
    /*00b0*/                   BRA 0x40 ;
"""


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        (LISTING, ["LDGSTS.E.BYPASS.128", "DEPBAR.LE", "BRA"]),
        (LISTING.replace("LDGSTS", "LDG"), ["FADD", "BAR.SYNC.DEFER_BLOCKING", "BRA"]),
        (LISTING.replace("BRA", "CALL"), []),
    ],
    ids=["copies asynchronously", "longest", "no loop"],
)
def test_main_loop(listing, expected):
    from kvcompress_kernels.report_triton import main_loop

    assert [op for op, _ in main_loop(listing)] == expected


TWO_LOOPS = """
    /*0000*/                   LDGSTS.E [R9], [R6.64] ;
    /*0010*/              @!P0 BRA 0x0 ;
    /*0020*/                   LDGSTS.E [R9], [R6.64] ;
    /*0030*/                   FADD R1, R2, R3 ;
    /*0040*/              @!P0 BRA 0x20 ;
    /*0050*/                   EXIT ;
"""


def test_main_loop_may_be_the_first_that_copies():
    from kvcompress_kernels.report_triton import main_loop

    assert [op for op, _ in main_loop(TWO_LOOPS)] == ["LDGSTS.E", "FADD", "BRA"]
    assert [op for op, _ in main_loop(TWO_LOOPS, first=True)] == ["LDGSTS.E", "BRA"]
    assert main_loop("", first=True) == []


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [(191, 67072, 8, 1), (255, 83200, 4, 2), (168, 0, 4, 3), (40, 116 << 10, 4, 1), (16, 0, 1, 32)],
)
def test_programs_per_sm(registers, shared, warps, programs):
    from kvcompress_kernels.report_triton import programs_per_sm

    assert programs_per_sm(90, registers, shared, warps) == programs


def test_missing_build_is_reported_if_all_were_built():
    part = section("3.9.0", (90,), {"fold": {90: figures(32)}})
    assert differences(part, SECTION, report_missing=False) == []
    assert differences(part, SECTION, report_missing=True) == [
        "fp8, sm_90: none now, 40, 0, 0, 4, 0, 64, 16, 2, none, none, none in the committed table"
    ]
