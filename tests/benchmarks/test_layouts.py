"""`benchmarks/bench_layouts.py` runs at a small size with the current engine code."""

import json
import os
import subprocess
import sys

import pytest_process

SHAPE = "--prompt 300 --layers 2 --heads 4 2 --dim 32 --block 32"
ONE_TURN = "--budgets 0.5 --turns 1 --threads 1"


def test_both_layouts_keep_the_same_bytes(tmp_path):
    """The benchmark itself compares all kept bytes. Its times are not checked."""
    root, out = pytest_process.ROOT, tmp_path / "out"
    path = os.pathsep.join([str(root), str(root / "kernels")])
    script = root / "benchmarks" / "bench_layouts.py"
    subprocess.run(
        [sys.executable, str(script), *SHAPE.split(), *ONE_TURN.split(), "--output", str(out)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    rows = json.loads(out.read_text())["milliseconds_by_budget"]
    assert rows["0.5"].keys() == {"vec", "amx", "tokens", "amx_over_vec"}
