"""The maximum blocks of one request during prefill."""

from collections.abc import Iterator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.schedules.pieces import piece_schedule
from vllm_kvcompress.settings.config import CompressionConfig


def uncompressed_prompt_blocks(
    settings: CompressionConfig,
    num_layers: int,
    block_size: int,
    max_tokens: int,
    itemsize: int = 2,
) -> int:
    """Return the maximum blocks of one request while its prompt of up to `max_tokens` is computed.

    This covers the budgets that the operator set. A request that asks for a larger budget may be
    refused.

    Args:
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        max_tokens: tokens of the longest prompt.
        itemsize: bytes of a cached number.
    """
    uncompressed = -(-max_tokens // block_size)
    if settings.pieces.max_whole is None:
        return uncompressed
    blocks = -(-min(settings.pieces.max_whole, max_tokens) // block_size)
    for variant in _granted_variants(settings):
        page_tokens = packed_page_tokens(variant, block_size, itemsize)
        pieces = piece_schedule(
            variant, num_layers, block_size, max_tokens, page_tokens=page_tokens
        )
        blocks = max(blocks, uncompressed if pieces is None else pieces.max_blocks)
    return min(blocks, uncompressed)


def _granted_variants(settings: CompressionConfig) -> Iterator[CompressionConfig]:
    """Yield every method that a request may use, with each budget that requires no override.

    A budget comes with its alias's format of kept tokens, or with the engine's.
    """
    yield from settings.variants
    if not settings.allow_override:
        return
    for method in {settings.compress, *settings.allow_override} - {"off"}:
        for alias in settings.alias:
            if alias.budget is None:
                continue
            try:
                yield settings.variant(method, alias.budget, alias.packed_dtype)
            except ConfigError:
                # The budget does not fit the method, so such a request is refused.
                continue
