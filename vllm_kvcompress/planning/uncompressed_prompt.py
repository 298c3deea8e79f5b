"""What one request takes at most while its prompt is computed, whatever requests may ask for."""

from collections.abc import Iterator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.pieces import pieces_of
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import largest_budgets


def uncompressed_prompt_blocks(
    settings: CompressionConfig, num_layers: int, block_size: int, longest: int
) -> int:
    """Blocks that one request takes at most while its prompt of up to `longest` is computed.

    This holds at the budgets that the operator gave. A request that names a larger one may be
    refused.
    """
    whole = -(-longest // block_size)
    if settings.max_whole is None:
        return whole
    most = -(-min(settings.max_whole, longest) // block_size)
    for variant in _granted(settings):
        pieces = pieces_of(variant, num_layers, block_size, longest)
        most = max(most, whole if pieces is None else pieces.most_blocks)
    return min(most, whole)


def _granted(settings: CompressionConfig) -> Iterator[CompressionConfig]:
    """Every method that a request may come by, at each budget that nobody has to name."""
    for variant in settings.variants:
        for budget in largest_budgets(settings, variant.compress).granted:
            try:
                yield variant.variant(budget=budget)
            except ConfigError:
                # such a request is refused: the budget does not hold the method's window
                continue
