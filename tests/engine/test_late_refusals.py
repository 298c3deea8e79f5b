"""Refusals that need the built model. They come before its KV cache is allocated."""

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
from vllm_kvcompress.engine.messages.cache_spec import CompressedSpec, compressed_specs
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
    """Set the default dtype, as vLLM does while it builds a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_equal_full_attention_layers_are_accepted():
    specs = compressed_specs({"a": full(), "b": full()}, CAKE)
    assert all(isinstance(spec, CompressedSpec) for spec in specs.values())
    assert {spec.num_compressed_layers for spec in specs.values()} == {2}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 32}, "this model has 32; set packed_dtype to auto"),
        ({"block_size": 12}, "got blocks of 12; set --block-size 8, or set packed_dtype to auto"),
        ({"block_size": 24, "dtype": torch.bfloat16}, "set --block-size 16, or"),
    ],
)
def test_pages_that_cannot_hold_k4v3_are_refused(changes, reason):
    """vLLM chooses the block size of hybrid models late."""
    k4v3 = CompressionConfig.parse({"compress": "cake", "packed_dtype": "k4v3"})
    specs = {"a": full(**changes), "b": full(**changes)}
    with pytest.raises(ConfigError, match=reason):
        compressed_specs(specs, k4v3)
    assert compressed_specs(specs, CAKE)
    assert compressed_specs({"a": full(), "b": full()}, k4v3)


@pytest.mark.parametrize(
    ("odd_layer", "reason"),
    [
        (SlidingWindowSpec(**{**SHAPE, "num_kv_heads": 4}, sliding_window=512), "b differs from a"),
        (full(sliding_window=128), r"b is sliding-window attention \(128 tokens\)"),
        (full(attention_chunk_size=64), "b is FullAttentionSpec"),
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64), "b is ChunkedLocal"),
        (MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,)), "b differs from a"),
        (full(num_kv_heads=4), "b differs from a"),
        (full(head_size=128), "b differs from a"),
        (full(dtype=torch.bfloat16), "b differs from a"),
        (full(dtype=torch.uint8), "b has head sizes 64 and 64 in torch.uint8"),
        (full(head_size_v=32), "b has head sizes 64 and 32 in torch.float32"),
    ],
)
@pytest.mark.parametrize("odd_first", [False, True])
def test_trap_12_layers_of_different_shapes_are_refused(odd_layer, reason, odd_first):
    layers = {"a": full(), "b": odd_layer}
    if odd_first:
        layers = dict(reversed(layers.items()))
        if not isinstance(odd_layer, SlidingWindowSpec | MambaSpec):
            reason = reason.replace("b differs from a", "a differs from b")
    with pytest.raises(ConfigError, match=reason) as refusal:
        compressed_specs(layers, CAKE)
    assert "without --kv-compress" in str(refusal.value)


def test_window_and_state_layers_need_a_full_attention_layer():
    window = SlidingWindowSpec(**SHAPE, sliding_window=512)
    with pytest.raises(
        ConfigError, match="all layers of this model have a sliding window or keep a state"
    ):
        compressed_specs({"a": window, "b": window}, CAKE)
    specs = compressed_specs({"a": window, "b": full(), "c": window, "d": full()}, CAKE)
    assert specs["a"] is specs["c"] is window
    assert specs["b"] == specs["d"]
    assert (type(specs["b"]), specs["b"].num_compressed_layers) == (CompressedSpec, 2)
    page = full().page_size_bytes
    # Without the prefix cache, vLLM sets a state's block size to the maximum sequence length.
    state = MambaSpec(
        block_size=8192, shapes=((4, 4),), dtypes=(torch.float32,), page_size_padded=page
    )
    with_state = compressed_specs({"a": state, "b": full()}, CAKE)
    assert (with_state["a"], type(with_state["b"])) == (state, CompressedSpec)
    for mixed in ([specs["b"], window], [window, specs["b"]]):
        with pytest.raises(AssertionError):  # vLLM groups layers by catching it
            type(specs["b"]).merge(mixed)


def test_decode_interval_must_be_a_multiple_of_the_block():
    settings = CompressionConfig.parse(
        {"compress": "cake", "decode_budget": 64, "decode_interval": 48}
    )
    with pytest.raises(
        ConfigError, match="must be a multiple of the KV block's 32 tokens, got 48; set it to 32"
    ):
        compressed_specs({"a": full()}, settings)


def test_piece_must_be_a_multiple_of_the_block():
    settings = CompressionConfig.parse({"compress": "cake", "max_whole": 1024, "piece": 48})
    with pytest.raises(
        ConfigError, match="must be a multiple of the KV block's 32 tokens, got 48; set it to 32"
    ):
        compressed_specs({"a": full()}, settings)


def test_model_without_a_kv_cache_is_refused():
    with pytest.raises(ConfigError, match="needs a model with a KV cache"):
        compressed_specs({}, CAKE)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (dict(alibi_slopes=[0.5, 0.25]), "ALiBi"),
        (dict(logits_soft_cap=30.0), "the soft cap of 30.0"),
        (dict(kv_sharing_target_layer_name="model.layers.0"), "must not share KV caches"),
        (dict(attn_type=AttentionType.ENCODER_ONLY), "has bidirectional attention"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
@pytest.mark.parametrize("impl", [CompressedCPUImpl, CompressedFlashImpl, CompressedTritonImpl])
def test_trap_12_attention_that_does_not_work_with_packed_pages_is_refused(
    impl, arguments, reason, vllm_config, monkeypatch
):
    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: True, raising=False)
    defaults = dict(alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto")
    with set_current_vllm_config(vllm_config):
        impl(2, 64, 0.125, num_kv_heads=2, **defaults)
        with pytest.raises(ConfigError, match=reason) as refusal:
            impl(2, 64, 0.125, num_kv_heads=2, **{**defaults, **arguments})
    assert "without --kv-compress" in str(refusal.value)


@pytest.mark.parametrize("cache_dtype", ["fp8_inc", "nvfp4"])
@pytest.mark.parametrize("impl", [CompressedCPUImpl, CompressedFlashImpl, CompressedTritonImpl])
def test_layers_with_an_unsupported_quantised_cache_are_refused(
    impl, cache_dtype, vllm_config, monkeypatch
):
    """vLLM decides the cache dtype for each layer while it builds the model."""
    monkeypatch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *a, **k: True,
                        raising=False)  # fmt: skip
    with (
        set_current_vllm_config(vllm_config),
        default_dtype(torch.bfloat16),
        pytest.raises(ConfigError, match="set --kv-cache-dtype bfloat16, this checkpoint decl"),
    ):
        impl(2, 64, 0.125, num_kv_heads=2, alibi_slopes=None, sliding_window=None,
             kv_cache_dtype=cache_dtype)  # fmt: skip


def test_fp8_checkpoint_runs_compressed_with_a_bfloat16_cache(checkpoints_folder, tmp_path):
    """A compressed-tensors checkpoint with scales gives the unquantised model's outputs."""
    unquantised = Path(make("llama-one-layer", checkpoints_folder))
    config = json.loads((unquantised / "config.json").read_text())
    scheme = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
    config["quantization_config"] = dict(
        quant_method="compressed-tensors", format="float-quantized", ignore=[], config_groups={},
        kv_cache_scheme=scheme,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(unquantised / "model.safetensors")
    for name in ("k_scale", "v_scale"):
        weights[f"model.layers.0.self_attn.{name}"] = torch.tensor([0.02])
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompt, outputs = tokens(600, seed=3), []
    for model, more in ((str(unquantised), {}), (str(tmp_path), {"kv_cache_dtype": "bfloat16"})):
        with engine(model, additional_config=settings(budget=0.3), dtype="bfloat16", **more) as llm:
            outputs.append(llm.generate([prompt], 8))
            assert llm.compressor.pool.pages.dtype == torch.bfloat16
    assert outputs[0] == outputs[1]


def test_backend_of_another_plugin_is_not_replaced():
    backend = AttentionBackendEnum.CPU_ATTN
    register_backend(backend, "somebody.elses.Backend")
    try:
        with (
            pytest.raises(
                VllmHookError, match=r"already replaced it with somebody\.elses\.Backend"
            ),
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
def test_fp8_scales_must_be_one_positive_number_per_layer(wrong, reason, checkpoints_folder):
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


def test_step_without_begin_batch_raises_instead_of_continuing(checkpoints_folder):
    """The prompt's blocks are already freed, so the next step would read unpacked blocks."""
    with engine(make("llama-gqa", checkpoints_folder), additional_config=settings()) as llm:
        llm.compressor.begin_batch = lambda *batch: None
        llm.submit("r", list(range(1, 300)), 4)
        with pytest.raises(RuntimeError, match="the step did not compress requests"):
            llm.step()


def test_layer_that_was_not_observed_stops_the_step(checkpoints_folder):
    """Its tokens would be chosen without its attention."""
    with engine(make("llama-gqa", checkpoints_folder), additional_config=settings()) as llm:
        context = llm.worker.vllm_config.compilation_config.static_forward_context
        list(context.values())[2].impl._compressor = None
        llm.submit("r", list(range(1, 300)), 4)
        with pytest.raises(RuntimeError, match="3 of 4 layers called their attention"):
            llm.step()


def merged_groups(config, ranks):
    """Return vLLM's cache groups for the specs of all ranks, before any cache is allocated."""
    try:
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups
    except ImportError:  # before 0.33
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        return get_kv_cache_configs(config, ranks, [2**30] * len(ranks))
    return get_global_kv_cache_groups(config, ranks)


def test_rank_without_compression_does_not_start(vllm_config):
    """vLLM compares the layer specs of all ranks."""
    compressed = compressed_specs({"model.layers.0.attn": full()}, CAKE)
    uncompressed = {"model.layers.0.attn": full()}
    for ranks in ([compressed, uncompressed], [uncompressed, compressed]):
        with pytest.raises(AssertionError, match="different across workers"):
            merged_groups(vllm_config, ranks)
