"""Refuse prompts that the KV cache can never hold, before any part of them runs.

vLLM makes sure that the longest sequence fits. With --kv-max-whole, sequences can be longer than
the pool, and a prompt may not fit because its request chooses `off` or a large budget.
"""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError

from vllm_kvcompress.engine.frontend.metrics import count_refusal
from vllm_kvcompress.engine.layers import layers_per_stage, other_layers_of
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.planning.group_pieces import GroupPieceSchedule
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.planning.pieces import piece_schedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import settings_for
from vllm_kvcompress.settings.protection import shorten
from vllm_kvcompress.settings.request_keys import BUDGET, COMPRESS
from vllm_kvcompress.settings.whole_blocks import in_whole_blocks


def check_token_budget(
    request_settings: CompressionConfig | None, extra_args: Mapping[str, Any], config: VllmConfig
) -> None:
    """Refuse a token budget that no prompt of this model can exceed.

    Args:
        request_settings: settings of the request; None if its prompt stays uncompressed.
        extra_args: extra arguments of the request.
        config: configuration of the engine.

    Raises:
        OverrideError: the budget is above `max_model_len`.
    """
    max_model_len = int(config.model_config.max_model_len)
    if (
        request_settings is None
        or BUDGET not in extra_args
        or not isinstance(request_settings.budget, int)
    ):
        return
    if request_settings.budget > max_model_len:
        raise OverrideError(
            "out_of_bounds",
            f"{BUDGET} must be at most {max_model_len}, the longest prompt on this server, got"
            f" {shorten(extra_args[BUDGET])}; lower it, or set {COMPRESS} to off",
        )


def check_fits_pool(
    config: VllmConfig,
    settings: CompressionConfig | None,
    extra_args: Mapping[str, Any] | None,
    tokens: int | None,
    spans: Spans,
) -> None:
    """Refuse a prompt that at some point needs more blocks than the pool has.

    Args:
        config: configuration of the engine. It has the pool's size once the engine has reported it.
        settings: settings of the engine; None without compression.
        extra_args: extra arguments of the request, already accepted by `settings_for`.
        tokens: prompt length; None if not known yet.
        spans: protected spans of the prompt.

    Raises:
        VLLMValidationError: the prompt is refused. vLLM's server answers with status 400.
    """
    total = config.cache_config.num_gpu_blocks
    if settings is None or settings.max_whole is None or not tokens or not total:
        return
    parallel, size = config.parallel_config, config.cache_config.block_size
    engines = parallel.data_parallel_size
    if parallel.local_engines_only:
        engines = parallel.data_parallel_size_local
    # The null block of each engine's pool cannot be allocated.
    blocks = total // max(engines, 1) - 1 - other_layers_of(config).blocks()
    request_settings = settings_for(in_whole_blocks(settings, int(size)), extra_args)
    layers = layers_per_stage(config)
    pieces = (
        None
        if request_settings is None
        else piece_schedule(
            request_settings,
            layers,
            size,
            tokens,
            spans,
            packed_page_tokens(request_settings, size, config.model_config.dtype.itemsize),
        )
    )
    needed = -(-tokens // size) if pieces is None else pieces.max_blocks
    if needed <= blocks:
        return
    count_refusal("too_long")
    if pieces is None:
        fix = "it stays uncompressed; choose a method that compresses it, or send a shorter one"
    else:
        # In k4v3, pieces keep every token.
        budget = "" if isinstance(pieces, GroupPieceSchedule) else "choose a smaller budget, or "
        fix = f"even if it is compressed piece by piece; {budget}send a shorter one"
    raise VLLMValidationError(
        f"this prompt of {tokens} tokens needs {needed} blocks of the KV cache, which has"
        f" {blocks}: {fix}",
        parameter="prompt",
    )
