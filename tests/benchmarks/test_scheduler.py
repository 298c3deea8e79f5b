"""`benchmarks/bench_scheduler.py` runs at a small size with the current engine code."""

import json
import os
import subprocess
import sys

import pytest_process

SIZE = "--rounds 1 --warm-up 0 --decode-steps 2 --layers 1"


def test_every_configuration_is_measured(tmp_path):
    """The times are not checked."""
    root, out = pytest_process.ROOT, tmp_path / "out"
    path = os.pathsep.join([str(root), str(root / "kernels")])
    script = root / "benchmarks" / "bench_scheduler.py"
    subprocess.run(
        [sys.executable, str(script), *SIZE.split(), "--json", str(out)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    result = json.loads(out.read_text())
    assert result["microseconds"].keys() == result["commits"].keys() == {"after"}
    by_configuration = result["microseconds"]["after"]
    assert by_configuration.keys() == {"vllm", "idle", "compressing"}
    for by_case in by_configuration.values():
        assert by_case.keys() == {"one_long", "many_short", "decode"}
        for by_call in by_case.values():
            assert by_call["schedule"]["best_us"] > 0
            assert by_call["update_from_output"]["best_us"] > 0
