"""The maximum blocks of one request during prefill."""

from collections.abc import Iterator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.pieces import piece_schedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import largest_budgets


def uncompressed_prompt_blocks(
    settings: CompressionConfig, num_layers: int, block_size: int, max_tokens: int
) -> int:
    """Return the maximum blocks of one request while its prompt of up to `max_tokens` is computed.

    This covers the budgets that the operator set. A request that asks for a larger budget may be
    refused.

    Args:
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        max_tokens: tokens of the longest prompt.
    """
    uncompressed = -(-max_tokens // block_size)
    if settings.max_whole is None:
        return uncompressed
    blocks = -(-min(settings.max_whole, max_tokens) // block_size)
    for variant in _granted_variants(settings):
        pieces = piece_schedule(variant, num_layers, block_size, max_tokens)
        blocks = max(blocks, uncompressed if pieces is None else pieces.max_blocks)
    return min(blocks, uncompressed)


def _granted_variants(settings: CompressionConfig) -> Iterator[CompressionConfig]:
    """Yield every method that a request may use, at each budget that requires no override."""
    for variant in settings.variants:
        for budget, _ in largest_budgets(settings, variant.compress).granted:
            try:
                yield variant.variant(budget=budget)
            except ConfigError:
                # The budget is smaller than the method's window, so such a request is refused.
                continue
