"""vLLM features such as logprobs, LoRA and structured output work with compression."""

import pytest

from checkpoints import make, text_checkpoint, tokens, write_adapter
from engines import V2, engine, settings

PROMPT = tokens(400, seed=11)
# in Triton's interpreter, each prompt token costs as much as a step
LOGGED = PROMPT[:140] if V2 else PROMPT


@pytest.fixture(scope="module")
def logprobs(model):
    """Return vLLM's and the compressed output of one prompt, with prompt and output logprobs."""

    def run(llm):
        return llm.outputs([LOGGED], 4, prompt_logprobs=1, logprobs=3)[0]

    with engine(model) as llm:
        uncompressed = run(llm)
    with engine(model, additional_config=settings(budget=0.1)) as llm:
        compressed = run(llm)
        assert llm.compressor.compressed == 1
    return uncompressed, compressed


def test_trap_20_prompt_logprobs_match_the_uncompressed_model(logprobs):
    """Prompt logprobs are computed during prefill, before tokens are dropped."""
    uncompressed, compressed = logprobs
    assert len(compressed.prompt_logprobs) == len(LOGGED)
    for logprobs_of_token, expected in zip(
        compressed.prompt_logprobs[1:], uncompressed.prompt_logprobs[1:], strict=True
    ):
        assert {k: v.logprob for k, v in logprobs_of_token.items()} == pytest.approx(
            {k: v.logprob for k, v in expected.items()}, abs=1e-4
        )


def test_first_token_logprobs_match_the_uncompressed_model(logprobs):
    uncompressed, compressed = (output.outputs[0].logprobs[0] for output in logprobs)
    assert {k: v.logprob for k, v in compressed.items()} == pytest.approx(
        {k: v.logprob for k, v in uncompressed.items()}, abs=1e-5
    )


@pytest.mark.skipif(V2, reason="LoRA kernels do not run under Triton's interpreter")
def test_trap_21_lora_and_plain_requests_match_vllm(model, tmp_path):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("adapter", 1, write_adapter(tmp_path, layers=4, hidden=128))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def run(llm, loras, prompt=PROMPT):
        inputs = [{"prompt_token_ids": prompt} for _ in loras]
        done = llm.llm.generate(inputs, params, lora_request=loras, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in done]

    # vLLM's CPU LoRA gives other outputs in mixed batches, so compare the same batches.
    batches = [[None], [adapter], [None, adapter, None], [adapter, None]]
    lora = dict(enable_lora=True, max_lora_rank=8, max_loras=1, enable_prefix_caching=False)
    with engine(model, **lora) as llm:
        uncompressed = [run(llm, batch) for batch in batches]
        assert uncompressed[0] != uncompressed[1]
    with engine(model, additional_config=settings(budget=1.0), **lora) as llm:
        assert [run(llm, batch) for batch in batches] == uncompressed
    config = settings(budget=0.2, max_whole=450, piece=96, probe=16, probe_first=16)
    with engine(model, additional_config=config, **lora) as llm:
        compressed = [run(llm, batch) for batch in batches]
        assert [[out[0] for out in batch] for batch in compressed] == [
            [out[0] for out in batch] for batch in uncompressed
        ]
        assert llm.compressor.compressed == 7
        # pieces are scored by the prompt's end with the adapter, for all chunk sizes
        long_prompt, outputs = tokens(600, seed=12), []
        for max_batched_tokens in (512, 40, 70):
            llm.scheduler.max_num_scheduled_tokens = max_batched_tokens
            outputs.append(run(llm, [adapter], long_prompt))
        assert outputs[0] == outputs[1] == outputs[2] != run(llm, [None], long_prompt)


@pytest.mark.skipif(V2, reason="vLLM's bitmask kernel does not run under Triton's interpreter")
def test_structured_output_works_on_a_compressed_prompt(demo_model, checkpoints_folder):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_kvcompress.serving.text import english

    with engine(
        text_checkpoint(checkpoints_folder, demo_model),
        additional_config=settings(budget=0.3, max_whole=400, piece=192),
        skip_tokenizer_init=False,
        max_model_len=1024,
    ) as llm:
        texts = [
            f"{english()[:length]}\nIs this about Python? Answer yes or no:"
            for length in (1200, 1500, 2700)  # the last prompt is prefilled in pieces
        ]
        params = SamplingParams(
            temperature=0,
            max_tokens=8,
            structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
        )
        outputs = llm.llm.generate(texts, params, use_tqdm=False)
        assert llm.compressor.compressed == 3
        assert [len(output.prompt_token_ids) > 400 for output in outputs] == [False, False, True]
        assert {output.outputs[0].text for output in outputs} <= {"yes", "no"}


def test_a_seeded_request_samples_the_same_tokens_however_its_prompt_is_chunked(model):
    """vLLM samples, and discards, a token after each unfinished chunk.

    Its V1 runner then rewinds the request's generator, which generators on a CPU refuse.
    """
    prompts = [tokens(length, seed=length) for length in (100, 400, 600)]  # the last one in pieces
    sampling = {"temperature": 1.0, "seed": 7}
    with engine(model) as llm:
        expected = llm.generate(prompts, 6, **sampling)
    config = settings(budget=0.3, max_whole=450, piece=192, probe=16)
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        solo = [llm.generate([prompt], 6, **sampling)[0] for prompt in prompts]
        assert solo[0] == expected[0]
        assert solo[1][0] == expected[1][0]
        for max_batched_tokens in (300, 70):
            llm.scheduler.max_num_scheduled_tokens = max_batched_tokens
            assert llm.generate(prompts, 6, **sampling) == solo
        assert llm.compressor.compressed == 6
        # a resumed request computes its prompt and output again, in chunks
        llm.submit("short", prompts[0], 6, **sampling)
        while not llm.running() or llm.running()[0].num_output_tokens < 2:
            llm.step()
        llm.preempt(llm.running()[0])
        assert list(llm.drain().values()) == solo[:1]
        several = llm.outputs(prompts[:1], 6, n=2, **sampling)
    assert several[0].outputs[0].token_ids != several[0].outputs[1].token_ids
    with engine(model) as llm:
        outputs = llm.outputs(prompts[:1], 6, n=2, **sampling)
    assert [each.token_ids for each in outputs[0].outputs] == [
        each.token_ids for each in several[0].outputs
    ]


@pytest.mark.slow
@pytest.mark.skipif(V2, reason="torch.compile does not depend on the model runner")
def test_a_compiled_model_matches_an_eager_one(checkpoints_folder, tool):
    tool("g++", "Debian's package g++")
    model = make("llama-two-layers", checkpoints_folder)
    with engine(model, additional_config=settings()) as llm:
        eager = llm.generate([PROMPT, PROMPT[:100]], 10)
    with engine(model, additional_config=settings(), enforce_eager=False) as llm:
        assert llm.worker.vllm_config.compilation_config.mode.name != "NONE"
        assert llm.generate([PROMPT, PROMPT[:100]], 10) == eager
        assert llm.compressor.compressed == 1
