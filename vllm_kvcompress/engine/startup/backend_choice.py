"""Choose an attention backend on CUDA if the user did not: the first of ours that vLLM accepts.

vLLM's default differs by GPU (FLASHINFER on data-centre Blackwell) and is chosen while vLLM builds
the model. We choose earlier, from the backends that compression supports.
"""

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.refusals.tested import CUDA_BACKENDS

logger = init_logger("vllm.kvcompress")


def choose_backend(config: VllmConfig) -> None:
    """Set ``--attention-backend`` if vLLM would choose it, and log the choice.

    Raises:
        ConfigError: vLLM accepts none of our backends for this model on this GPU.
    """
    attention, model = config.attention_config, config.model_config
    per_kind = getattr(attention, "backend_per_kind", None) or {}
    if attention.backend or "full_attention" in per_kind:
        return
    reasons = []
    for name in CUDA_BACKENDS:
        attention.backend = AttentionBackendEnum[name]
        try:
            with set_current_vllm_config(config):
                get_attn_backend(
                    model.get_head_size(), model.dtype, config.cache_config.cache_dtype
                )
        except (ValueError, ImportError) as e:
            attention.backend = None
            reasons.append(" ".join(str(e).split()))
            continue
        logger.info("the attention backend is %s, the first that --kv-compress supports here", name)
        return
    raise ConfigError(
        f"--kv-compress supports the attention backends {list(CUDA_BACKENDS)}, and vLLM accepts"
        f" neither here ({'; '.join(reasons)}); serve without --kv-compress"
    )
