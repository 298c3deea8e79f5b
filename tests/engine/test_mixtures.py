"""Mixture-of-experts models are compressed like dense models.

`test_reference` compares the kept tokens of such models with the float64 reference methods.
"""

import pytest

from checkpoints import MIXTURES, make, tokens
from engines import engine, model_runner_v1_only, settings

pytestmark = model_runner_v1_only

LENGTHS = (417, 256, 90)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
NEW = 12
EXTRA_ARGS = {
    "uncompressed": {"kv_budget": 1.0},
    "cake": {},
    "snapkv": {"kv_compress": "snapkv"},
    "h2o": {"kv_compress": "h2o"},
    "d2o": {"kv_compress": "d2o", "kv_budget": 0.4},
}


def run(llm, names):
    """Return the output tokens of all prompts with these `EXTRA_ARGS`, submitted together."""
    for name in names:
        for prompt in PROMPTS:
            llm.submit(f"{name} {len(prompt)}", prompt, NEW, extra_args=EXTRA_ARGS[name] or None)
    return llm.drain()


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_are_compressed(name, checkpoints_folder):
    """Compare with vLLM's outputs, and concurrent requests with single ones; all blocks return."""
    model = make(name, checkpoints_folder)
    with engine(model, max_model_len=1024) as llm:
        context = llm.worker.vllm_config.compilation_config.static_forward_context
        vllm_outputs = llm.generate(PROMPTS, NEW)
        assert any("experts" in layer for layer in context)
    with engine(
        model,
        additional_config=settings("cake", 0.25, allow_override="all"),
        max_model_len=1024,
        max_num_batched_tokens=200,
        max_num_seqs=16,
        enable_prefix_caching=False,
    ) as llm:
        free = llm.free_blocks
        single = {}
        for name_of_args in EXTRA_ARGS:
            single |= run(llm, [name_of_args])
        assert llm.compressor.compressed == 4 * 2
        for length, vllm_output in zip(LENGTHS, vllm_outputs, strict=True):
            assert single[f"uncompressed {length}"] == vllm_output
            for name_of_args in EXTRA_ARGS:
                assert single[f"{name_of_args} {length}"][0] == vllm_output[0]
        assert all(
            single[f"{name_of_args} 90"] == vllm_outputs[-1] for name_of_args in EXTRA_ARGS
        )  # below min_prompt
        assert len({tuple(single[f"{name_of_args} 417"]) for name_of_args in EXTRA_ARGS}) >= 3
        assert run(llm, list(EXTRA_ARGS)[::-1]) == single
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
