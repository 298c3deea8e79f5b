"""Refuse prompts that the KV cache can never hold, before any part of them runs.

vLLM makes sure that the longest sequence fits. With --kv-max-whole, sequences can be longer than
the pool, and a prompt may not fit because its request chooses `off` or a large budget.
"""

from vllm.config import VllmConfig

from vllm_kvcompress.engine.layers import layers_per_stage, other_layers_of
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.schedules.pieces import piece_schedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions


def check_fits_pool(
    config: VllmConfig, settings: CompressionConfig, options: RequestOptions, tokens: int | None
) -> None:
    """Refuse a prompt that at some point needs more blocks than the pool has.

    Args:
        config: configuration of the engine. It has the pool's size once the engine has reported it.
        settings: settings of the engine.
        options: options of the request, with the protected spans of the prompt.
        tokens: prompt length; None if not known yet.

    Raises:
        OverrideError: the prompt is refused.
    """
    total = config.cache_config.num_gpu_blocks
    if settings.pieces.max_whole is None or not tokens or not total:
        return
    parallel, size = config.parallel_config, config.cache_config.block_size
    engines = parallel.data_parallel_size
    if parallel.local_engines_only:
        engines = parallel.data_parallel_size_local
    # The null block of each engine's pool cannot be allocated.
    blocks = total // max(engines, 1) - 1 - other_layers_of(config).blocks()
    request_settings = options.choice.resolve(settings.in_whole_blocks(int(size)))
    layers = layers_per_stage(config)
    pieces = (
        None
        if request_settings is None
        else piece_schedule(
            request_settings,
            layers,
            size,
            tokens,
            options.spans,
            packed_page_tokens(request_settings, size, config.model_config.dtype.itemsize),
        )
    )
    needed = -(-tokens // size) if pieces is None else pieces.max_blocks
    if needed <= blocks:
        return
    if pieces is None:
        fix = "it stays uncompressed; choose a method that compresses it, or send a shorter one"
    else:
        # In k4v3, pieces keep every token.
        budget = "" if pieces.keeps_all_tokens else "choose a smaller budget, or "
        fix = f"even if it is compressed piece by piece; {budget}send a shorter one"
    raise OverrideError(
        "too_long",
        f"this prompt of {tokens} tokens needs {needed} blocks of the KV cache, which has"
        f" {blocks}: {fix}",
        parameter="prompt",
    )
