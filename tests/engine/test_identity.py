"""Where nothing may change, nothing changes; and the first token never does."""

import pytest

from checkpoints import HYBRIDS, SHAPES, make, tokens
from engines import V2, engine, settings

LENGTHS = (300, 129, 640, 31, 1) if V2 else (700, 333, 90, 1500, 128, 127, 1)
PROMPTS = [tokens(n, seed=n) for n in LENGTHS]
SOME = ["llama-gqa", "gpt-oss"] if V2 else [*SHAPES, *HYBRIDS]
# every method on one checkpoint, two methods on all
METHODS = dict.fromkeys(SOME, ("pyramidkv", "cake"))
METHODS["llama-gqa"] = ("snapkv", "pyramidkv", "streamingllm", "cake")


@pytest.fixture(scope="module")
def plain(checkpoints_folder):
    """vLLM's own output per checkpoint, made once."""
    made = {}

    def outputs(name: str):
        if name not in made:
            with engine(make(name, checkpoints_folder)) as llm:
                assert type(llm.worker).__module__.startswith("vllm.")
                made[name] = llm.generate(PROMPTS)
        return made[name]

    return outputs


@pytest.fixture(scope="module", params=SOME)
def own(request, checkpoints_folder, plain):
    """A checkpoint's name, and its engine, of which requests may ask for any method."""
    plain(request.param)  # before this engine, lest there be two
    config = settings("cake", 1.0, allow_override="all")
    with engine(make(request.param, checkpoints_folder), additional_config=config) as llm:
        yield request.param, llm


def test_budget_one_is_vllms_own_output(own, plain):
    name, llm = own
    assert llm.generate(PROMPTS) == plain(name)
    assert llm.compressor.compressed == 0


@pytest.mark.parametrize("name", SOME[:2])
def test_trap_16_prompts_under_the_threshold_are_vllms_own_output(name, plain, checkpoints_folder):
    config = settings("cake", 0.1, min_prompt=max(LENGTHS) + 1)
    with engine(make(name, checkpoints_folder), additional_config=config) as llm:
        assert llm.generate(PROMPTS) == plain(name)
        assert llm.compressor.compressed == 0


def test_first_token_is_the_full_caches_with_every_method(own, plain):
    name, llm = own
    packed = llm.watch_packing(lambda finished: finished.pack_request)
    for method in METHODS[name]:
        packed.clear()
        assert llm.llm.reset_prefix_cache()
        got = llm.generate(PROMPTS, extra_args={"kv_compress": method, "kv_budget": 0.2})
        whole = [length for length in LENGTHS if length >= 128]
        assert sorted(pack_request.plan.tokens for pack_request in packed) == sorted(whole)
        assert {pack_request.settings.compress for pack_request in packed} == {method}
        assert [out[0] for out in got] == [out[0] for out in plain(name)]
        # a prompt that was left whole is untouched by its compressed neighbours
        for length, mine, theirs in zip(LENGTHS, got, plain(name), strict=True):
            if length < 128:
                assert mine == theirs


@pytest.mark.parametrize("own", ["llama-gqa"], indirect=True)
@pytest.mark.parametrize("budget", [0.9, 0.1] if V2 else [0.9, 0.5, 0.1, 100])
def test_first_token_at_every_budget(budget, own, plain):
    name, llm = own
    assert llm.llm.reset_prefix_cache()
    before = llm.compressor.compressed
    got = llm.generate(PROMPTS, extra_args={"kv_budget": budget})
    assert llm.compressor.compressed > before
    assert [out[0] for out in got] == [out[0] for out in plain(name)]


def test_without_the_setting_nothing_is_overridden(checkpoints_folder):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    import vllm_kvcompress

    vllm_kvcompress.register()
    vllm_kvcompress.register()  # idempotent
    for config in ({}, {"kvcompress": {"compress": "off"}}):
        with engine(make("llama-gqa", checkpoints_folder), additional_config=config) as llm:
            assert type(llm.manager) is FullAttentionManager
            assert type(llm.scheduler) in (Scheduler, AsyncScheduler)
            assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
            context = llm.worker.vllm_config.compilation_config.static_forward_context
            for layer in context.values():
                assert layer.attn_backend is CPUAttentionBackend
                assert type(layer.impl) is CPUAttentionBackendImpl
