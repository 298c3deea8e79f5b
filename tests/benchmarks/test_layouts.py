"""`benchmarks/bench_layouts.py` at a small size: its engine's parts are those of today."""

import json
import os
import subprocess
import sys

import again

SHAPE = "--prompt 300 --layers 2 --heads 4 2 --dim 32 --block 32"
ONCE = "--budgets 0.5 --turns 1 --threads 1"


def test_what_is_kept_of_tiles_is_what_is_kept_of_rows(tmp_path):
    """The benchmark compares every byte itself; its times are not judged."""
    path, out = os.pathsep.join([str(again.ROOT), str(again.ROOT / "kernels")]), tmp_path / "out"
    script = again.ROOT / "benchmarks" / "bench_layouts.py"
    subprocess.run(
        [sys.executable, str(script), *SHAPE.split(), *ONCE.split(), "--output", str(out)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    rows = json.loads(out.read_text())["milliseconds_by_budget"]
    assert rows["0.5"].keys() == {"vec", "amx", "tokens", "amx_over_vec"}
