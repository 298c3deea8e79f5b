"""Defaults of `decode_interval` and `piece`, rounded to whole KV blocks.

Both must be multiples of the KV block. Hybrid models size a block to their recurrent state, for
example 528 tokens, which no fixed default is a multiple of.
"""

from functools import lru_cache

from vllm_kvcompress.settings.config import CompressionConfig


def in_whole_blocks(settings: CompressionConfig, block_size: int) -> CompressionConfig:
    """Return `settings` with the default interval and piece rounded to whole KV blocks.

    Each becomes the largest multiple of the block up to its default, but at least one block. The
    interval is also at least the decode window. Values that the user set stay as they are, and
    are refused if they do not fit.

    Args:
        settings: settings of the engine or of a request.
        block_size: tokens per KV block.
    """
    return _rounded(settings, settings.given_keys, block_size)


@lru_cache(maxsize=256)
def _rounded(
    settings: CompressionConfig, fields_set: frozenset[str], block_size: int
) -> CompressionConfig:
    # `fields_set` is part of the cache key: equal settings may differ in which fields were set.
    windows = (variant.resolved_decode_window for variant in settings.variants)
    min_tokens = {"decode_interval": max(windows, default=1), "piece": 1}
    limits = {"decode_interval": settings.decode.budget, "piece": settings.pieces.max_whole}
    defaults = {key: settings.value(key) for key, limit in limits.items() if limit is not None}
    rounded = {
        key: max(tokens // block_size, -(-min_tokens[key] // block_size)) * block_size
        for key, tokens in defaults.items()
        if key not in fields_set and tokens % block_size
    }
    if not rounded:
        return settings
    return CompressionConfig.parse({**settings.to_additional_config(), **rounded})
