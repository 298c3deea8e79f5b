"""Uncompressed outputs equal vLLM's, and the first token is the same at every budget."""

import pytest

from checkpoints import HYBRIDS, MIXTURES, SHAPES, make, tokens
from engines import V2, engine, model_runner_v1_only, settings

LENGTHS = (300, 129, 640, 31, 1) if V2 else (700, 333, 90, 1500, 128, 127, 1)
PROMPTS = [tokens(n, seed=n) for n in LENGTHS]
CHECKPOINTS = ["llama-gqa", "gpt-oss"] if V2 else [*SHAPES, *HYBRIDS, *MIXTURES]
# four methods on one checkpoint, two on the others
METHODS = dict.fromkeys(CHECKPOINTS, ("pyramidkv", "cake"))
METHODS["llama-gqa"] = ("snapkv", "cake") if V2 else ("snapkv", "pyramidkv", "streamingllm", "cake")


@pytest.fixture(scope="module")
def vllm_outputs(checkpoints_folder):
    """Return a function that returns vLLM's outputs for a checkpoint, computed once."""
    by_checkpoint = {}

    def outputs(name: str):
        if name not in by_checkpoint:
            with engine(make(name, checkpoints_folder)) as llm:
                assert type(llm.worker).__module__.startswith("vllm.")
                by_checkpoint[name] = llm.generate(PROMPTS)
        return by_checkpoint[name]

    return outputs


@pytest.fixture(scope="module", params=CHECKPOINTS)
def named_engine(request, checkpoints_folder, vllm_outputs):
    """Return a checkpoint's name, and its engine, which allows all per-request overrides."""
    vllm_outputs(request.param)  # first, so that only one engine exists at a time
    config = settings("cake", 1.0, allow_override="all")
    with engine(make(request.param, checkpoints_folder), additional_config=config) as llm:
        yield request.param, llm


def test_budget_one_matches_vllms_output(named_engine, vllm_outputs):
    name, llm = named_engine
    assert llm.generate(PROMPTS) == vllm_outputs(name)
    assert llm.compressor.compressed == 0


def test_trap_16_first_tokens_and_short_prompts_match_vllm_with_every_method(
    named_engine, vllm_outputs
):
    name, llm = named_engine
    packed = llm.watch_packing(lambda finished: finished.pack_request)
    for method in METHODS[name]:
        packed.clear()
        assert llm.llm.reset_prefix_cache()
        outputs = llm.generate(PROMPTS, extra_args={"kv_compress": method, "kv_budget": 0.2})
        compressed_lengths = [length for length in LENGTHS if length >= 128]
        assert sorted(pack_request.plan.tokens for pack_request in packed) == sorted(
            compressed_lengths
        )
        assert {pack_request.settings.compress for pack_request in packed} == {method}
        assert [out[0] for out in outputs] == [out[0] for out in vllm_outputs(name)]
        # prompts below `min_prompt` are not compressed, and concurrent requests do not change them
        for length, output, vllm_output in zip(LENGTHS, outputs, vllm_outputs(name), strict=True):
            if length < 128:
                assert output == vllm_output


@model_runner_v1_only
@pytest.mark.parametrize("named_engine", ["llama-gqa"], indirect=True)
@pytest.mark.parametrize("budget", [0.9, 0.5, 0.1, 100])
def test_the_first_token_matches_vllm_at_every_budget(budget, named_engine, vllm_outputs):
    name, llm = named_engine
    assert llm.llm.reset_prefix_cache()
    before = llm.compressor.compressed
    outputs = llm.generate(PROMPTS, extra_args={"kv_budget": budget})
    assert llm.compressor.compressed > before
    assert [out[0] for out in outputs] == [out[0] for out in vllm_outputs(name)]


def test_without_the_setting_vllm_is_unchanged(model):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    import vllm_kvcompress

    vllm_kvcompress.register()
    vllm_kvcompress.register()  # idempotent
    for config in ({}, {"kvcompress": {"compress": "off"}}):
        with engine(model, additional_config=config) as llm:
            assert type(llm.manager) is FullAttentionManager
            assert type(llm.scheduler) in (Scheduler, AsyncScheduler)
            assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
            context = llm.worker.vllm_config.compilation_config.static_forward_context
            for layer in context.values():
                assert layer.attn_backend is CPUAttentionBackend
                assert type(layer.impl) is CPUAttentionBackendImpl
