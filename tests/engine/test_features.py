"""vLLM's default features beside compression: each keeps its own meaning."""

import json

import pytest

from checkpoints import make, talking, tokens
from engines import V2, engine, settings

PROMPT = tokens(400, seed=11)
# each of its tokens costs Triton's interpreter as much as a step
LOGGED = PROMPT[:200] if V2 else PROMPT


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-gqa", checkpoints_folder)


@pytest.fixture(scope="module")
def logprobs(model):
    """Uncompressed and compressed, the same prompt with log-probabilities of prompt and answer."""

    def ask(llm):
        return llm.outputs([LOGGED], 4, prompt_logprobs=1, logprobs=3)[0]

    with engine(model) as llm:
        plain = ask(llm)
    with engine(model, additional_config=settings(budget=0.1)) as llm:
        ours = ask(llm)
        assert llm.compressor.compressed == 1
    return plain, ours


def test_trap_20_prompt_logprobs_are_the_full_caches(logprobs):
    """They are computed in prefill, before anything is dropped."""
    plain, ours = logprobs
    assert len(ours.prompt_logprobs) == len(LOGGED)
    for mine, theirs in zip(ours.prompt_logprobs[1:], plain.prompt_logprobs[1:], strict=True):
        assert {k: v.logprob for k, v in mine.items()} == pytest.approx(
            {k: v.logprob for k, v in theirs.items()}, abs=1e-4
        )


def test_logprobs_of_the_first_token_are_the_full_caches(logprobs):
    plain, ours = (output.outputs[0].logprobs[0] for output in logprobs)
    assert {k: v.logprob for k, v in ours.items()} == pytest.approx(
        {k: v.logprob for k, v in plain.items()}, abs=1e-5
    )


@pytest.mark.skipif(V2, reason="LoRA kernels do not run under Triton's interpreter")
def test_trap_21_lora_requests_beside_plain_ones(model, tmp_path):
    import torch
    from safetensors.torch import save_file
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    generator = torch.Generator().manual_seed(5)
    weights = {}
    for layer in range(4):
        for name, out in (("q_proj", 128), ("v_proj", 64)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(8, 128, generator=generator) * 0.3
            weights[f"{key}.lora_B.weight"] = torch.randn(out, 8, generator=generator) * 0.3
    save_file(weights, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": 8,
                "lora_alpha": 16,
                "target_modules": ["q_proj", "v_proj"],
                "bias": "none",
                "task_type": "CAUSAL_LM",
            }
        )
    )
    adapter = LoRARequest("adapter", 1, str(tmp_path))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def run(llm, loras, prompt=PROMPT):
        inputs = [{"prompt_token_ids": prompt} for _ in loras]
        done = llm.llm.generate(inputs, params, lora_request=loras, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in done]

    # vLLM's CPU LoRA answers differently in mixed batches, also without us: compare like with like.
    batches = [[None], [adapter], [None, adapter, None], [adapter, None]]
    lora = dict(enable_lora=True, max_lora_rank=8, max_loras=1, enable_prefix_caching=False)
    with engine(model, **lora) as llm:
        plain = [run(llm, batch) for batch in batches]
        assert plain[0] != plain[1]
    with engine(model, additional_config=settings(budget=1.0), **lora) as llm:
        assert [run(llm, batch) for batch in batches] == plain
    config = settings(budget=0.2, max_whole=450, piece=96, probe=16, probe_first=16)
    with engine(model, additional_config=config, **lora) as llm:
        ours = [run(llm, batch) for batch in batches]
        assert [[out[0] for out in batch] for batch in ours] == [
            [out[0] for out in batch] for batch in plain
        ]
        assert llm.compressor.compressed == 7
        # in pieces, that the prompt's end judges: the adapter's, whatever chunks there are
        long, answers = tokens(600, seed=12), []
        for room in (512, 40, 70):
            llm.scheduler.max_num_scheduled_tokens = room
            answers.append(run(llm, [adapter], long))
        assert answers[0] == answers[1] == answers[2] != run(llm, [None], long)


@pytest.mark.skipif(V2, reason="vLLM's bitmask kernel does not run under Triton's interpreter")
def test_structured_output_holds_on_a_compressed_prompt(demo_model, checkpoints_folder):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_kvcompress.serving.text import english

    with engine(
        talking(checkpoints_folder, demo_model),
        additional_config=settings(budget=0.3, max_whole=400, piece=192),
        skip_tokenizer_init=False,
        max_model_len=1024,
    ) as llm:
        texts = [
            f"{english()[:length]}\nIs this about Python? Answer yes or no:"
            for length in (1200, 1500, 2700)  # the last one goes in pieces
        ]
        params = SamplingParams(
            temperature=0,
            max_tokens=8,
            structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
        )
        answers = llm.llm.generate(texts, params, use_tqdm=False)
        assert llm.compressor.compressed == 3
        assert [len(answer.prompt_token_ids) > 400 for answer in answers] == [False, False, True]
        assert {answer.outputs[0].text for answer in answers} <= {"yes", "no"}


def test_stop_strings_and_lengths_are_vllms(model):
    with engine(model, additional_config=settings()) as llm:
        first = llm.generate([PROMPT], 10)[0]
        stopped = llm.outputs([PROMPT], 10, stop_token_ids=[first[4]])[0].outputs[0]
        assert list(stopped.token_ids) == first[: first.index(first[4]) + 1]
        assert stopped.finish_reason == "stop"
        assert llm.outputs([PROMPT], 10)[0].outputs[0].finish_reason == "length"


@pytest.mark.slow
@pytest.mark.skipif(V2, reason="torch.compile does not depend on the model runner")
def test_a_compiled_model_answers_as_an_eager_one(checkpoints_folder, tool):
    tool("g++", "Debian's package g++")
    model = make("llama-two-layers", checkpoints_folder)
    with engine(model, additional_config=settings()) as llm:
        eager = llm.generate([PROMPT, PROMPT[:100]], 10)
    with engine(model, additional_config=settings(), enforce_eager=False) as llm:
        assert llm.worker.vllm_config.compilation_config.mode.name != "NONE"
        assert llm.generate([PROMPT, PROMPT[:100]], 10) == eager
        assert llm.compressor.compressed == 1
