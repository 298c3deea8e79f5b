"""These tests again on the Triton kernels, in Triton's interpreter: one process per file."""

import os

import pytest

import again

KERNELS = again.ROOT / "kernels" / "kvcompress_kernels"
OPS = sorted(
    path.name.removesuffix("_ref.py")
    for path in KERNELS.glob("*_ref.py")
    if (KERNELS / path.name.replace("_ref", "_triton")).exists()
)
FILES = [f"tests/kernels/test_{name}.py" for name in (*OPS, "float8", "window_batches")]


@pytest.fixture(scope="module")
def runs():
    with again.runs(FILES, {"TRITON_INTERPRET": "1"}) as started:
        yield started


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this process is in it already")
@pytest.mark.parametrize("file", FILES)
def test_triton_equals_its_contract(file, runs):
    done = runs[file].result()
    assert done.returncode == 0, again.said(done)
    assert " passed" in done.stdout, "no test ran"


@pytest.mark.parametrize("file", FILES)
def test_every_op_has_a_test(file):
    assert (again.ROOT / file).exists()
