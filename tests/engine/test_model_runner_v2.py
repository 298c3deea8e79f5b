"""The engine's tests again on Model Runner V2, which is what CUDA runs: one process per file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import V2

FILES = (
    *("test_identity", "test_invariance", "test_blocks", "test_sharing"),
    *("test_traps", "test_reference", "test_features", "test_methods"),
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(V2, reason="this process is on it already")
@pytest.mark.parametrize("name", FILES)
def test_on_model_runner_v2(name):
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*line, f"tests/engine/{name}.py"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
