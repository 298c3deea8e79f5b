"""These tests again on the Triton kernels, in Triton's interpreter: one process per file."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "kvcompress_kernels"
PAIRS = sorted(
    path.name.removesuffix("_ref.py")
    for path in KERNELS.glob("*_ref.py")
    if (KERNELS / path.name.replace("_ref", "_triton")).exists()
)


def _interpreted(op):
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*line, f"tests/kernels/test_{op}.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def runs():
    """All of them, as many at once as there are cores: the interpreter uses one."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {op: pool.submit(_interpreted, op) for op in PAIRS}


@pytest.mark.slow
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this process is in it already")
@pytest.mark.parametrize("op", PAIRS)
def test_triton_equals_its_contract(op, runs):
    done = runs[op].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("op", PAIRS)
def test_every_op_has_a_test(op):
    assert (Path(__file__).parent / f"test_{op}.py").exists()
