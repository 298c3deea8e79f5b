"""Run the kernel tests again with Triton's interpreter, in one separate process."""

import os

import pytest

import pytest_process

KERNELS = pytest_process.ROOT / "kernels" / "kvcompress_kernels"
OPS = sorted(path.parent.name for path in KERNELS.glob("*/triton.py"))
SHARED = {"key_cosines": "per_token_ops", "value_norms": "per_token_ops"}
"""Tests of ops that share a file."""
MORE_TESTS = ("sinks", "float8", "window_layers", "window_log_sums", "large_caches", "merged_rows")
MORE_TESTS += ("overflow", "direct_operators")
TESTS = dict.fromkeys([*(SHARED.get(op, op) for op in OPS), *MORE_TESTS])
FILES = [f"tests/kernels/test_{name}.py" for name in TESTS]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="already runs in the interpreter")
def test_triton_kernels_match_the_references(tmp_path):
    # The interpreter multiplies matrices with numpy. Some OpenBLAS kernels, such as Haswell's, sum
    # the columns at the edge of a matrix in another order than the inner columns, so that equal
    # keys get different scores. Nehalem's kernels and GPUs use one order.
    environment = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    done = pytest_process.run(FILES, environment, tmp_path)
    assert done.ok, done.output
    assert all(done.passed.values()), f"a file without a passed test: {done.passed}"


def test_every_op_has_a_test():
    assert "window_scores" in OPS
    assert [file for file in FILES if not (pytest_process.ROOT / file).exists()] == []
