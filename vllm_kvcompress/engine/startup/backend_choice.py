"""Choose the attention backend on CUDA where nobody did: the first of ours that vLLM takes.

vLLM's own first choice differs by GPU (FLASHINFER on data-centre Blackwell), and it chooses while
it builds the model. Here it is chosen before that, among those that compression runs on.
"""

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend

from vllm_kvcompress.engine.startup.refusals import CUDA_BACKENDS
from vllm_kvcompress.errors import ConfigError

logger = init_logger("vllm.kvcompress")


def choose_backend(config: VllmConfig) -> None:
    """Set ``--attention-backend`` where vLLM would choose it, and log the choice.

    Raises:
        ConfigError: vLLM takes none of ours for this model on this GPU.
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
        logger.info("the attention backend is %s, since none was asked for", name)
        return
    raise ConfigError(
        f"--kv-compress works with the attention backends {list(CUDA_BACKENDS)}, and vLLM takes"
        f" neither here ({'; '.join(reasons)}); serve without --kv-compress"
    )
