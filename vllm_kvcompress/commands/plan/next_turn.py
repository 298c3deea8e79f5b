"""What a chat's next turn finds in the prefix cache, and how many idle conversations stay there."""

from dataclasses import replace

from vllm_kvcompress.commands.plan.forecast import Forecast, NextHits, WarmConversations
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.planning.memory import Sizes, scratch_blocks
from vllm_kvcompress.planning.request import PlannedRequest

_FP8_BYTES = 1


def next_hits(request: PlannedRequest) -> NextHits:
    """Return the tokens of a request that the next turn of its chat finds in the prefix cache.

    Blocks enter the cache until the request is packed for the first time. The next turn must
    compute the queries that its method reads; its new message is assumed to contain them. With
    ``--kv-reuse``, packed pages are in the cache too, and no query is needed.
    """
    settings, block, hit = request.settings, request.block_size, request.cached
    if settings.enabled:
        hit = min(request.first_packed_at, hit)
        window = max(settings.resolved_window, 1)
        prefill = replace(request, prompt=request.prompt + request.output + window).prefill
        if prefill is not None:
            hit = prefill.longest_prefix_hit(hit)
        elif settings.decode.budget is not None and Reads.COLUMN_SUMS in settings.method.reads:
            hit = 0
        if settings.reuses_pages and packed_tokens(request):
            hit = request.cached
    return NextHits(off=request.cached // block * block, on=hit // block * block)


def packed_tokens(request: PlannedRequest) -> int:
    """Return the tokens that a request leaves in packed pages, its first block included; or 0.

    On a grid, a prompt of less than one cell is packed with its output. One that stays uncompressed
    for another reason is not.

    Args:
        request: a request whose settings reuse pages.
    """
    settings, block = request.settings, request.block_size
    page = request.page_tokens or block
    interval, cell, packed = settings.output_interval(page), settings.grid_cell(page), 0
    if cell is None:
        if request.plan is not None:
            packed = max(request.prompt - block, 0) // page * page
    elif request.plan is None and max(request.prompt + 1, settings.resolved_min_prompt) > (
        block + cell
    ):
        return 0
    packed += max(request.cached - block - packed, 0) // interval * interval
    return block + packed if packed else 0


def warm_conversations(
    request: PlannedRequest, sizes: Sizes, forecast: Forecast
) -> WarmConversations:
    """Return how many idle conversations of one request's length stay in the forecast's pools."""
    block = request.block_size
    blocks_off = blocks_on = request.cached // block
    if tokens := packed_tokens(request):
        pages = (tokens - block) // (request.page_tokens or block)
        blocks_on = 1 + pages + (request.cached - tokens) // block
    off = fp8 = on = None
    if forecast.pool_off is not None and forecast.pool_on is not None and blocks_off:
        # One block is vLLM's null block, which holds no token.
        fp8_block_bytes = sizes.block_bytes // sizes.key_itemsize * _FP8_BYTES
        off = forecast.pool_off.blocks // blocks_off
        fp8 = (forecast.pool_off.pool_bytes // fp8_block_bytes - 1) // blocks_off
        on = forecast.pool_on.blocks // blocks_on
    return WarmConversations(
        blocks_off=blocks_off,
        blocks_on=blocks_on,
        off=off,
        fp8=fp8,
        on=on,
        scratch_bytes=scratch_blocks(sizes, request.settings) * sizes.block_bytes,
    )
