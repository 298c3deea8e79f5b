"""Run engine tests again on Model Runner V2, which CUDA uses, in one process.

The files that are not listed do not depend on the runner: they test vLLM's scheduler and block
manager, the front end, refusals, and scoring and packing behind the mapping of batch rows to
requests. Tests marked `model_runner_v1_only` are skipped for the same reason, and of `ONE_CASE` one
test is enough.
"""

import pytest

import pytest_process
from engines import V2, serves_states, v2_drafts
from processor import AVX512

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

ONE_CASE = {
    "reuse": "test_later_turns_find_prompt_and_output_and_equal_cold_runs[async]",
    "added_attention": "test_every_step_matches_the_reference[h2o]",
    "quantised": "test_attention_matches_the_reference[cake-fp8]",
}


def files():
    """Return the files, and ids of tests, that this vLLM version and this CPU can run."""
    extra_files = [f"{name}.py::{test}" for name, test in ONE_CASE.items()]
    extra_files = extra_files if AVX512 else extra_files[:-1]
    extra_files += ["ngram.py", "eagle.py"] if v2_drafts() else []
    extra_files += ["state_space.py"] if serves_states() else []
    return [*FILES, *(f"tests/engine/test_{name}" for name in extra_files)]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(V2, reason="this process already uses Model Runner V2")
def test_engine_files_pass_on_model_runner_v2(tmp_path):
    result = pytest_process.run(files(), {"VLLM_USE_V2_MODEL_RUNNER": "1"}, tmp_path)
    assert result.ok, result.output
    assert all(result.passed.values()), f"a file ran no tests: {result.passed}"
