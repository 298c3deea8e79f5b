"""The benchmarks' logits processor: an engine writes the answer that it is given."""

from benchmarks import engine_bench
from checkpoints import make, tokens
from engines import V2, engine, settings


def test_an_engine_writes_what_it_is_given(checkpoints_folder):
    """Of its own mind in between: whoever has no text to write, and what it finds likely."""
    writing = engine_bench._writing_on_v2 if V2 else engine_bench._writing_on_v1
    text, prompts = tokens(7, seed=3), [tokens(150, seed=1), tokens(140, seed=2)]
    with engine(
        make("llama-gqa", checkpoints_folder),
        additional_config=settings("cake", 0.5),
        logits_processors=[writing()],
        max_num_seqs=4,
        max_model_len=512,
    ) as llm:
        own, other = llm.outputs(prompts, 7, logprobs=2)
        chosen = [output.outputs[0].token_ids for output in (own, other)]
        written, again = (
            llm.outputs(prompts, 7, logprobs=2, extra_args={"write": text}),
            llm.generate(prompts, 7),
        )
    for output, free in zip(written, (own, other), strict=True):
        assert list(output.outputs[0].token_ids) == text
        likely = engine_bench.likely_tokens(output.outputs[0])
        # the first distribution has seen the prompt alone, whatever is written then
        assert list(likely[0])[:2] == list(engine_bench.likely_tokens(free.outputs[0])[0])[:2]
    assert again == [list(ids) for ids in chosen]
