"""Run engine tests again on Model Runner V2, which CUDA uses, in one process.

The files that are not listed do not depend on the runner: they test vLLM's scheduler and block
manager, the front end, refusals, and what is scored and packed once the request of each batch row
is known. Tests marked `model_runner_v1_only` are skipped for the same reason.
"""

import pytest

import pytest_process
from engines import V2, serves_states, v2_drafts

FILES = [
    f"tests/engine/test_{name}.py"
    for name in (
        "invariance",
        "traps",
        "sharing",
        "blocks",
        "identity",
        "features",
        "methods",
        "reference",
        "packed_groups",
        "lost_plans",
        "parking",
        "decode_budgets",
        "prompts_in_pieces",
        "probes",
        "cuda_backends",
        "log_sums",
        "lookahead",
        "lookahead_aborts",
        "offloading",
        "vision_language",
    )
]


def files():
    """Return the files of which this vLLM version can run a test."""
    extra_files = ["ngram", "eagle"] if v2_drafts() else []
    extra_files += ["state_space"] if serves_states() else []
    return [*FILES, *(f"tests/engine/test_{name}.py" for name in extra_files)]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(V2, reason="this process already uses Model Runner V2")
def test_engine_files_pass_on_model_runner_v2(tmp_path):
    result = pytest_process.run(files(), {"VLLM_USE_V2_MODEL_RUNNER": "1"}, tmp_path)
    assert result.ok, result.output
    assert all(result.passed.values()), f"a file ran no tests: {result.passed}"
