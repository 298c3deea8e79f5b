"""The engine's tests again on Model Runner V2, which is what CUDA runs, in one process.

Of the other files nothing depends on the runner: they are about vLLM's scheduler and block manager,
the front end, and refusals, which are the same classes above both. Of these files, tests that are
marked `first_runner` stay out for the same reason.
"""

import pytest

import again
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
        "lost_plans",
        "decode_budgets",
        "added_attention",
        "prompts_in_pieces",
        "added_pieces",
        "probes",
        "cuda_backends",
        "lookahead",
        "lookahead_leavers",
        "written_answers",
        "vision_language",
    )
]


def files():
    """Those of which this vLLM and this processor run a test."""
    more = ["quantised"] if AVX512 else []
    more += ["ngram"] if v2_drafts() else []
    more += ["state_space", "states_in_the_cache"] if serves_states() else []
    return [*FILES, *(f"tests/engine/test_{name}.py" for name in more)]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(V2, reason="this process is on it already")
def test_on_model_runner_v2(tmp_path):
    done = again.run(files(), {"VLLM_USE_V2_MODEL_RUNNER": "1"}, tmp_path)
    assert done.ok, done.said
    assert all(done.passed.values()), f"of some file no test ran: {done.passed}"
