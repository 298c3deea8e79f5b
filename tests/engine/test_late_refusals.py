"""What only the built model shows: refused before its KV cache exists, in one sentence."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from checkpoints import make, tokens
from engines import engine, settings
from processor import needs_avx512
from vllm_kvcompress.engine.attention import cpu as attention_cpu
from vllm_kvcompress.engine.attention.backend import override_backends
from vllm_kvcompress.engine.attention.cpu import CompressedCPUImpl
from vllm_kvcompress.engine.attention.cuda import CompressedFlashImpl, CompressedTritonImpl
from vllm_kvcompress.engine.scheduling.cache_spec import CompressedSpec, compressed_specs
from vllm_kvcompress.errors import ConfigError, VllmHookError
from vllm_kvcompress.settings.config import CompressionConfig

SHAPE = dict(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
CAKE = CompressionConfig.parse({"compress": "cake"})


@pytest.fixture(scope="module")
def vllm_config(checkpoints_folder):
    model = make("llama-gqa", checkpoints_folder)
    return EngineArgs(model=model, skip_tokenizer_init=True).create_engine_config()


def full(**changes) -> FullAttentionSpec:
    return FullAttentionSpec(**{**SHAPE, **changes})


@contextmanager
def default_dtype(dtype: torch.dtype):
    """As vLLM sets it while it builds a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_equal_full_layers_are_taken():
    specs = compressed_specs({"a": full(), "b": full()}, CAKE)
    assert all(isinstance(spec, CompressedSpec) for spec in specs.values())
    assert {spec.num_compressed_layers for spec in specs.values()} == {2}


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (SlidingWindowSpec(**{**SHAPE, "num_kv_heads": 4}, sliding_window=512), "b differs from a"),
        (full(sliding_window=128), r"b is sliding-window attention \(128 tokens\)"),
        (full(attention_chunk_size=64), "b is FullAttentionSpec"),
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64), "b is ChunkedLocal"),
        (MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,)), "b differs from a"),
        (full(num_kv_heads=4), "b differs from a"),
        (full(head_size=128), "b differs from a"),
        (full(dtype=torch.bfloat16), "b differs from a"),
        (full(dtype=torch.uint8), "b keeps 64 and 64 of torch.uint8"),
        (full(head_size_v=32), "b keeps 64 and 32 of torch.float32"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_trap_12_layers_that_are_not_alike(last, reason, turned):
    layers = {"a": full(), "b": last}
    if turned:  # the odd one first: it is found too
        layers = dict(reversed(layers.items()))
        if not isinstance(last, SlidingWindowSpec | MambaSpec):
            reason = reason.replace("b differs from a", "a differs from b")
    with pytest.raises(ConfigError, match=reason) as refusal:
        compressed_specs(layers, CAKE)
    assert "without --kv-compress" in str(refusal.value)


def test_windows_and_states_without_a_full_layer_and_beside_one():
    window = SlidingWindowSpec(**SHAPE, sliding_window=512)
    with pytest.raises(ConfigError, match="all of this model's have a sliding window or keep a st"):
        compressed_specs({"a": window, "b": window}, CAKE)
    specs = compressed_specs({"a": window, "b": full(), "c": window, "d": full()}, CAKE)
    assert specs["a"] is specs["c"] is window
    assert specs["b"] == specs["d"]
    assert (type(specs["b"]), specs["b"].num_compressed_layers) == (CompressedSpec, 2)
    page = full().page_size_bytes
    # a state is none of a number of tokens: without the prefix cache its block is the longest text
    state = MambaSpec(
        block_size=8192, shapes=((4, 4),), dtypes=(torch.float32,), page_size_padded=page
    )
    beside = compressed_specs({"a": state, "b": full()}, CAKE)
    assert (beside["a"], type(beside["b"])) == (state, CompressedSpec)
    for mixed in ([specs["b"], window], [window, specs["b"]]):
        with pytest.raises(AssertionError):  # what vLLM's grouping takes for an answer
            type(specs["b"]).merge(mixed)


def test_an_interval_between_two_blocks():
    settings = CompressionConfig.parse(
        {"compress": "cake", "decode_budget": 64, "decode_interval": 48}
    )
    with pytest.raises(ConfigError, match="has 32 tokens here, got 48; set it to 32"):
        compressed_specs({"a": full()}, settings)


def test_a_piece_between_two_blocks():
    settings = CompressionConfig.parse({"compress": "cake", "max_whole": 1024, "piece": 48})
    with pytest.raises(ConfigError, match="has 32 tokens here, got 48; set it to 32"):
        compressed_specs({"a": full()}, settings)


def test_a_model_without_a_cache():
    with pytest.raises(ConfigError, match="needs a model with a KV cache"):
        compressed_specs({}, CAKE)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (dict(alibi_slopes=[0.5, 0.25]), "ALiBi"),
        (dict(logits_soft_cap=30.0), "a logits soft cap"),
        (dict(kv_sharing_target_layer_name="model.layers.0"), "KV sharing between layers"),
        (dict(attn_type=AttentionType.ENCODER_ONLY), "encoder_only attention"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
@pytest.mark.parametrize("impl", [CompressedCPUImpl, CompressedFlashImpl, CompressedTritonImpl])
def test_trap_12_attention_that_a_packed_page_cannot_serve(
    impl, arguments, reason, vllm_config, monkeypatch
):
    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: True, raising=False)
    usual = dict(alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto")
    with set_current_vllm_config(vllm_config):
        impl(2, 64, 0.125, num_kv_heads=2, **usual)
        with pytest.raises(ConfigError, match=reason) as refusal:
            impl(2, 64, 0.125, num_kv_heads=2, **{**usual, **arguments})
    assert "without --kv-compress" in str(refusal.value)


@pytest.mark.parametrize("stored", ["fp8_inc", "nvfp4"])
@pytest.mark.parametrize("impl", [CompressedCPUImpl, CompressedFlashImpl, CompressedTritonImpl])
def test_a_layer_whose_cache_a_checkpoint_quantised_in_another_way(
    impl, stored, vllm_config, monkeypatch
):
    """However it came to be: vLLM decides it per layer, while it builds the model."""
    monkeypatch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *a, **k: True,
                        raising=False)  # fmt: skip
    with (
        set_current_vllm_config(vllm_config),
        default_dtype(torch.bfloat16),
        pytest.raises(ConfigError, match="set --kv-cache-dtype bfloat16, this checkpoint decl"),
    ):
        impl(2, 64, 0.125, num_kv_heads=2, alibi_slopes=None, sliding_window=None,
             kv_cache_dtype=stored)  # fmt: skip


def test_the_cure_for_an_fp8_checkpoint_serves_it_compressed(checkpoints_folder, tmp_path):
    """compressed-tensors with its scales: its cache is bfloat16, its answers the plain model's."""
    plain = Path(make("llama-one-layer", checkpoints_folder))
    config = json.loads((plain / "config.json").read_text())
    scheme = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
    config["quantization_config"] = dict(
        quant_method="compressed-tensors", format="float-quantized", ignore=[], config_groups={},
        kv_cache_scheme=scheme,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(plain / "model.safetensors")
    for name in ("k_scale", "v_scale"):
        weights[f"model.layers.0.self_attn.{name}"] = torch.tensor([0.02])
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompt, answers = tokens(600, seed=3), []
    for model, more in ((str(plain), {}), (str(tmp_path), {"kv_cache_dtype": "bfloat16"})):
        with engine(model, additional_config=settings(budget=0.3), dtype="bfloat16", **more) as llm:
            answers.append(llm.generate([prompt], 8))
            assert llm.compressor.pool.pages.dtype == torch.bfloat16
    assert answers[0] == answers[1]


def test_another_plugins_backend_is_not_thrown_out():
    backend = AttentionBackendEnum.CPU_ATTN
    register_backend(backend, "somebody.elses.Backend")
    try:
        with (
            pytest.raises(VllmHookError, match=r"already put somebody\.elses\.Backend there"),
            override_backends(attention_cpu.BACKENDS),
        ):
            pytest.fail("must not be entered")
        assert backend.get_path() == "somebody.elses.Backend"
    finally:
        backend.clear_override()
    with override_backends(attention_cpu.BACKENDS):
        assert backend.is_overridden()
    assert not backend.is_overridden()


@needs_avx512
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"_k_scale": torch.ones(2)}, r"one positive scale per layer .* got \[1.0, 1.0\]"),
        ({"_k_scale_float": 0.0}, "one positive scale per layer"),
        ({"_v_scale_float": -1.0}, "one positive scale per layer"),
    ],
)
def test_scales_that_are_not_one_per_layer(wrong, reason, checkpoints_folder):
    from vllm_kvcompress.engine.worker.worker import bind_compressor

    model = make("llama-gqa", checkpoints_folder)
    with engine(model, additional_config=settings(), kv_cache_dtype="fp8") as llm:
        runner = llm.worker.model_runner
        context = llm.worker.vllm_config.compilation_config.static_forward_context
        for name, value in wrong.items():
            setattr(list(context.values())[-1], name, value)
        with pytest.raises(VllmHookError, match=reason):
            bind_compressor(
                llm.worker.vllm_config, llm.worker.settings, runner, runner.kv_cache_config
            )


def test_a_step_that_never_laid_out_its_batch_does_not_pass_for_a_compression(checkpoints_folder):
    """Its blocks are freed already: to go on would be to read what was never packed."""
    with engine(make("llama-gqa", checkpoints_folder), additional_config=settings()) as llm:
        llm.compressor.begin_batch = lambda *batch: None
        llm.submit("r", list(range(1, 300)), 4)
        with pytest.raises(RuntimeError, match="ran without its compressions of"):
            llm.step()


def test_a_layer_that_nobody_watched_does_not_pass_for_a_compression(checkpoints_folder):
    """What was kept would have been chosen without it."""
    with engine(make("llama-gqa", checkpoints_folder), additional_config=settings()) as llm:
        context = llm.worker.vllm_config.compilation_config.static_forward_context
        list(context.values())[2].impl._compressor = None
        llm.submit("r", list(range(1, 300)), 4)
        with pytest.raises(RuntimeError, match="3 of 4 layers were seen in a step"):
            llm.step()


def joined(config, ranks):
    """What vLLM makes of all ranks' layers before any of them has a cache."""
    try:
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups
    except ImportError:  # before 0.33
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        return get_kv_cache_configs(config, ranks, [2**30] * len(ranks))
    return get_global_kv_cache_groups(config, ranks)


def test_a_rank_that_is_not_ours_does_not_start(vllm_config):
    """vLLM compares what the ranks say of their layers."""
    ours = compressed_specs({"model.layers.0.attn": full()}, CAKE)
    theirs = {"model.layers.0.attn": full()}
    for ranks in ([ours, theirs], [theirs, ours]):
        with pytest.raises(AssertionError, match="different across workers"):
            joined(vllm_config, ranks)
