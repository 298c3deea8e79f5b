"""Mixtures of experts: what experts a token goes to is no matter of compression.

`test_reference` holds what is kept of such a model's cache against the methods in float64.
"""

import pytest

from checkpoints import MIXTURES, make, tokens
from engines import engine, first_runner, settings

pytestmark = first_runner

LENGTHS = (417, 256, 90)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
NEW = 12
ASKS = {
    "whole": {"kv_budget": 1.0},
    "cake": {},
    "snapkv": {"kv_compress": "snapkv"},
    "h2o": {"kv_compress": "h2o"},
    "d2o": {"kv_compress": "d2o", "kv_budget": 0.4},
}


def run(llm, asks):
    """Answers of each prompt with each method, all in one batch."""
    for name in asks:
        for prompt in PROMPTS:
            llm.submit(f"{name} {len(prompt)}", prompt, NEW, extra_args=ASKS[name] or None)
    return {key.split("-")[0]: answer for key, answer in llm.drain().items()}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_is_compressed_as_any_model(name, checkpoints_folder):
    """Whole, or its first token, is vLLM's own; each in company is itself alone; blocks return."""
    model = make(name, checkpoints_folder)
    with engine(model, max_model_len=1024) as llm:
        context = llm.worker.vllm_config.compilation_config.static_forward_context
        plain = llm.generate(PROMPTS, NEW)
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
        alone = {}
        for ask in ASKS:
            alone |= run(llm, [ask])
        assert llm.compressor.compressed == 4 * 2
        for length, theirs in zip(LENGTHS, plain, strict=True):
            assert alone[f"whole {length}"] == theirs
            for ask in ASKS:
                assert alone[f"{ask} {length}"][0] == theirs[0]
        assert all(alone[f"{ask} 90"] == plain[-1] for ask in ASKS)  # under the threshold
        assert len({tuple(alone[f"{ask} 417"]) for ask in ASKS}) >= 3
        assert run(llm, list(ASKS)[::-1]) == alone
        llm.settle()
        assert llm.free_blocks == free
