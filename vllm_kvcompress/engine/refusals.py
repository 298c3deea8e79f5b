"""What compression cannot work with, each refused in one sentence before the model loads."""

from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.errors import ConfigError

CUDA_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
_WITHOUT = "serve this model without --kv-compress"

# Architectures whose attention adds ALiBi, or may by their config.
_ALIBI_MODEL_TYPES = frozenset({"bloom", "mpt", "jais"})
_ALIBI_ARCHITECTURES = frozenset({"BaichuanForCausalLM"})


def _alibi(config: VllmConfig) -> str | None:
    hf = config.model_config.hf_text_config
    attn = getattr(hf, "attn_config", None)
    in_attn = attn.get("alibi") if isinstance(attn, dict) else getattr(attn, "alibi", None)
    named = getattr(hf, "model_type", None) in _ALIBI_MODEL_TYPES and in_attn is not False
    baichuan13 = (
        set(getattr(hf, "architectures", None) or ()) & _ALIBI_ARCHITECTURES
        and getattr(hf, "hidden_size", 0) != 4096
    )
    position = getattr(hf, "position_embedding_type", None) == "alibi"
    known = getattr(config.model_config, "uses_alibi", False)
    if known or getattr(hf, "alibi", False) or in_attn or named or baichuan13 or position:
        return (
            f"ALiBi needs every token at its true position, which a packed page has not; {_WITHOUT}"
        )
    return None


def _platform(config: VllmConfig) -> str | None:
    if current_platform.is_cpu():
        return None
    if not current_platform.is_cuda():
        return (
            "it runs on CUDA and on CPUs, this is"
            f" {current_platform.device_name}; serve without --kv-compress on this machine"
        )
    if not config.use_v2_model_runner:
        return (
            "on CUDA it runs on Model Runner V2 alone; unset VLLM_USE_V2_MODEL_RUNNER, and see in"
            " vLLM's log which option made it take V1"
        )
    return None


def _backend(config: VllmConfig) -> str | None:
    chosen = config.attention_config.backend
    if current_platform.is_cuda() and chosen is not None and chosen.name not in CUDA_BACKENDS:
        return (
            f"the attention backend must be one of {list(CUDA_BACKENDS)}, got {chosen.name};"
            f" pass --attention-backend {CUDA_BACKENDS[0]}"
        )
    return None


def _mla(config: VllmConfig) -> str | None:
    if config.model_config.use_mla:
        return f"MLA models keep one latent per token instead of keys and values; {_WITHOUT}"
    return None


def _full_attention(config: VllmConfig) -> str | None:
    model = config.model_config
    hf = model.hf_text_config
    types = set(getattr(hf, "layer_types", None) or ())
    if model.runner_type != "generate":
        return f"only generating models decode, this one is for {model.runner_type}; {_WITHOUT}"
    if getattr(model, "is_diffusion", False):
        return f"diffusion models take tokens back after they were counted; {_WITHOUT}"
    if getattr(model, "is_encoder_decoder", False):
        return f"encoder-decoder models are not supported; {_WITHOUT}"
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        return f"every layer must be full attention, this model has state-space layers; {_WITHOUT}"
    if types - {"full_attention"}:
        return f"every layer must be full attention, this model has {sorted(types)}; {_WITHOUT}"
    window = model.get_sliding_window()
    if window is not None:
        return (
            f"every layer must be full attention, this model has a sliding window of {window};"
            f" {_WITHOUT}, or pass --disable-sliding-window for prompts shorter than it"
        )
    return None


def _soft_cap(config: VllmConfig) -> str | None:
    cap = getattr(config.model_config.hf_text_config, "attn_logit_softcapping", None)
    if cap:
        return f"scores are taken before the soft cap of {cap} on this model's logits; {_WITHOUT}"
    return None


def _kv_connector(config: VllmConfig) -> str | None:
    if config.kv_transfer_config is not None:
        return (
            "KV connectors and P/D disaggregation move blocks by their tokens' hash, and a"
            " compressed block does not hold them; remove --kv-transfer-config (or"
            " --kv-offloading-size)"
        )
    return None


def _context_parallel(config: VllmConfig) -> str | None:
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            flag = "--" + name.replace("_", "-")
            return f"context parallelism spreads one prompt over ranks; set {flag} 1, got {size}"
    return None


def _pipeline_parallel(config: VllmConfig) -> str | None:
    size = config.parallel_config.pipeline_parallel_size
    if size > 1:
        return (
            "all layers must be on one rank for now; set --pipeline-parallel-size 1 and use"
            f" --tensor-parallel-size, got {size}"
        )
    return None


def _executor(config: VllmConfig) -> str | None:
    backend = config.parallel_config.distributed_executor_backend
    if backend in ("ray", "external_launcher"):
        return (
            "every step must go through the worker, and this executor calls the model runner"
            f" itself; set --distributed-executor-backend mp, got {backend}"
        )
    return None


def _fault_tolerance(config: VllmConfig) -> str | None:
    if getattr(config.parallel_config, "enable_fault_tolerance", False):
        return (
            "a worker that survives a failed step would keep packed requests that are gone; remove"
            " --enable-fault-tolerance"
        )
    return None


def _microbatches(config: VllmConfig) -> str | None:
    parallel = config.parallel_config
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0):
        return "dual-batch overlap splits a batch in two; remove --enable-dbo and --ubatch-size"
    return None


def _speculative(config: VllmConfig) -> str | None:
    if config.speculative_config is not None:
        return (
            "speculative decoding with a draft model rolls back tokens that compression has"
            " already counted, and other speculation is untested; remove --speculative-config"
        )
    return None


def _cascade(config: VllmConfig) -> str | None:
    if getattr(config.model_config, "disable_cascade_attn", True) is False:
        return (
            "cascade attention reads a shared prefix that compressed requests no longer have;"
            " remove --no-disable-cascade-attn"
        )
    return None


def _cache_dtype(config: VllmConfig) -> str | None:
    dtype = config.cache_config.cache_dtype
    if dtype not in {"auto", "float16", "bfloat16", "float32"}:
        return f"quantised KV caches are not supported yet; set --kv-cache-dtype auto, got {dtype}"
    return None


def _kv_sharing(config: VllmConfig) -> str | None:
    shared = getattr(config.model_config.hf_text_config, "num_kv_shared_layers", 0)
    if shared:
        return f"layers must not share KV caches, and {shared} of this model do; {_WITHOUT}"
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        return "layers must not share KV caches; remove --kv-sharing-fast-prefill"
    return None


def _window_fits(config: VllmConfig, settings: CompressionConfig) -> str | None:
    longest = config.model_config.max_model_len
    window = max(variant.resolved_window for variant in settings.variants)
    if window >= longest:
        return (
            "the window must be shorter than the longest prompt;"
            f" set --kv-window below {longest}, got {window}"
        )
    return None


def _front_end(config: VllmConfig) -> str | None:
    if envs.VLLM_USE_RUST_FRONTEND:
        return (
            "the Rust front end neither checks what requests ask for nor counts; unset"
            " VLLM_USE_RUST_FRONTEND"
        )
    return None


REFUSALS: tuple[Callable[[Any], str | None], ...] = (
    _platform,
    _backend,
    _mla,
    _alibi,
    _full_attention,
    _soft_cap,
    _kv_connector,
    _context_parallel,
    _pipeline_parallel,
    _executor,
    _fault_tolerance,
    _microbatches,
    _speculative,
    _cascade,
    _cache_dtype,
    _kv_sharing,
    _front_end,
)


def refuse_unsupported(config: VllmConfig, settings: CompressionConfig) -> None:
    """Raise ConfigError with the first reason why `config` cannot be served compressed."""
    for check in REFUSALS:
        if (reason := check(config)) is not None:
            raise ConfigError(f"--kv-compress {settings.compress}: {reason}")
    if (reason := _window_fits(config, settings)) is not None:
        raise ConfigError(f"--kv-compress {settings.compress}: {reason}")
