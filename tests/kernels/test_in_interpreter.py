"""These tests again on the Triton kernels, in Triton's interpreter, in one process."""

import os

import pytest

import again

KERNELS = again.ROOT / "kernels" / "kvcompress_kernels"
OPS = sorted(path.parent.name for path in KERNELS.glob("*/triton.py"))
OF_SEVERAL = (
    "sinks",
    "figures_of_tokens",
    "float8",
    "window_layers",
    "large_caches",
    "merged_rows",
    "overflow",
)
FILES = [f"tests/kernels/test_{name}.py" for name in (*OPS, *OF_SEVERAL)]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this process is in it already")
def test_triton_equals_its_contract(tmp_path):
    # The interpreter multiplies by numpy. Some kernels of its OpenBLAS, Haswell's among them, sum
    # the columns at the edge of a matrix in another order than the others: equal keys get scores
    # that differ by rounding. A GPU does no such thing, nor do the kernels that are named here.
    own = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    done = again.run(FILES, own, tmp_path)
    assert done.ok, done.said
    assert all(done.passed.values()), f"of some file no test ran: {done.passed}"


def test_every_op_has_a_test():
    assert "window_scores" in OPS
    assert [file for file in FILES if not (again.ROOT / file).exists()] == []
