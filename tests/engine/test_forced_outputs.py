"""The benchmarks' logits processor, which makes an engine write a given output."""

from benchmarks import engine_bench
from checkpoints import make, tokens
from engines import V2, engine, settings


def test_engine_writes_the_forced_output(checkpoints_folder):
    """Requests with a given text write it. Others keep their outputs and their likely tokens."""
    processor = engine_bench._processor_for_v2() if V2 else engine_bench._processor_for_v1()
    text, prompts = tokens(7, seed=3), [tokens(150, seed=1), tokens(140, seed=2)]
    with engine(
        make("llama-gqa", checkpoints_folder),
        additional_config=settings("cake", 0.5),
        logits_processors=[processor],
        max_num_seqs=4,
        max_model_len=512,
    ) as llm:
        free_results = llm.outputs(prompts, 7, logprobs=2)
        free_outputs = [list(result.outputs[0].token_ids) for result in free_results]
        forced_results = llm.outputs(prompts, 7, logprobs=2, extra_args={"write": text})
        outputs_after = llm.generate(prompts, 7)
    for forced, free in zip(forced_results, free_results, strict=True):
        assert list(forced.outputs[0].token_ids) == text
        # The first distribution depends only on the prompt, not on what is written.
        forced_likely = engine_bench.top_logprobs(forced.outputs[0])
        free_likely = engine_bench.top_logprobs(free.outputs[0])
        assert list(forced_likely[0])[:2] == list(free_likely[0])[:2]
    assert outputs_after == free_outputs
