"""Seam `room`: refuse a prompt that the KV cache can never hold, before anything of it runs.

vLLM makes sure that one longest sequence fits. Where long prompts are packed in pieces, sequences
may be longer than the pool, and a prompt that is left whole may not fit, because the request asks
for `off` or for a large budget.
"""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError

from vllm_kvcompress.engine.frontend.metrics import count_refusal
from vllm_kvcompress.engine.layers import layers_together, other_layers_of
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.planning.pieces import pieces_of
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import settings_for
from vllm_kvcompress.settings.request_keys import BUDGET, COMPRESS
from vllm_kvcompress.settings.whole_blocks import in_whole_blocks


def check_reach(
    own: CompressionConfig | None, extra_args: Mapping[str, Any], config: VllmConfig
) -> None:
    """Refuse a budget in tokens that no prompt of this model can exceed.

    Args:
        own: the request's settings; None where its prompt stays uncompressed.

    Raises:
        OverrideError: the request names such a budget.
    """
    longest = int(config.model_config.max_model_len)
    if own is None or BUDGET not in extra_args or not isinstance(own.budget, int):
        return
    if own.budget > longest:
        raise OverrideError(
            "out_of_bounds",
            f"{BUDGET} must be at most {longest}, the most tokens of a prompt on this server, got"
            f" {own.budget}; lower it, or ask for {COMPRESS} off",
        )


def check_room(
    config: VllmConfig,
    settings: CompressionConfig | None,
    extra_args: Mapping[str, Any] | None,
    tokens: int | None,
    spans: Spans,
) -> None:
    """Refuse a prompt whose largest holding takes more blocks than the pool has.

    Args:
        config: the engine's, which has the pool's size once the engine has reported it.
        settings: the engine's; None without compression.
        extra_args: the request's, which `settings_for` has accepted.
        tokens: prompt length; None where it is not known yet.
        spans: what of it is protected.

    Raises:
        VLLMValidationError: the prompt is refused; vLLM's server answers it with status 400.
    """
    total = config.cache_config.num_gpu_blocks
    if settings is None or settings.max_whole is None or not tokens or not total:
        return
    parallel, size = config.parallel_config, config.cache_config.block_size
    engines = parallel.data_parallel_size
    if parallel.local_engines_only:
        engines = parallel.data_parallel_size_local
    # a null block in each engine's pool is nobody's
    blocks = total // max(engines, 1) - 1 - other_layers_of(config).blocks()
    own = settings_for(in_whole_blocks(settings, int(size)), extra_args)
    layers = layers_together(config)
    pieces = None if own is None else pieces_of(own, layers, size, tokens, spans)
    most = -(-tokens // size) if pieces is None else pieces.most_blocks
    if most <= blocks:
        return
    count_refusal("too_long")
    if pieces is None:
        how = "it must stand whole; ask for a method that compresses it, or send a shorter one"
    else:
        how = "even if it is packed piece by piece; ask for a smaller budget, or send a shorter one"
    raise VLLMValidationError(
        f"this prompt of {tokens} tokens takes {most} blocks of the KV cache, which has"
        f" {blocks}: {how}",
        parameter="prompt",
    )
