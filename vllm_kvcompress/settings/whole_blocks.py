"""The interval and the piece that nobody gave, once a KV block's length is known.

Both must end with a block. In models whose layers keep a state a block is as long as that state is
large, so it may have 528 tokens, of which no usual length is a multiple.
"""

from functools import lru_cache

from vllm_kvcompress.settings.config import CompressionConfig


def in_whole_blocks(settings: CompressionConfig, block_size: int) -> CompressionConfig:
    """These settings, with an interval and a piece that end with a block of so many tokens.

    The largest that are within the usual ones and hold a window, or one block. What was given stays
    as it is: `why_not_in_blocks` refuses what does not fit.
    """
    return _fitting(settings, frozenset(settings.model_fields_set), block_size)


@lru_cache(maxsize=256)
def _fitting(
    settings: CompressionConfig, given: frozenset[str], block_size: int
) -> CompressionConfig:
    # settings that are equal may differ in what was given
    windows = (variant.resolved_decode_window for variant in settings.variants)
    least = {"decode_interval": max(windows, default=1), "piece": 1}
    asked = {"decode_interval": settings.decode_budget, "piece": settings.max_whole}
    lengths = {key: getattr(settings, key) for key, limit in asked.items() if limit is not None}
    fitting = {
        key: max(tokens // block_size, -(-least[key] // block_size)) * block_size
        for key, tokens in lengths.items()
        if key not in given and tokens % block_size
    }
    if not fitting:
        return settings
    return CompressionConfig.parse({**settings.to_additional_config(), **fitting})
