"""The engine's tests again on Model Runner V2, which is what CUDA runs: one process per file."""

import pytest

import again
from engines import V2

FILES = [
    f"tests/engine/test_{name}.py"
    for name in (
        *("invariance", "traps", "sharing", "blocks"),
        *("identity", "features", "methods", "reference"),
        "cuda_backends",
    )
]


@pytest.fixture(scope="module")
def runs():
    with again.runs(FILES, {"VLLM_USE_V2_MODEL_RUNNER": "1"}) as started:
        yield started


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(V2, reason="this process is on it already")
@pytest.mark.parametrize("file", FILES)
def test_on_model_runner_v2(file, runs):
    done = runs[file].result()
    assert done.returncode == 0, again.said(done)
    assert " passed" in done.stdout, "no test ran"
