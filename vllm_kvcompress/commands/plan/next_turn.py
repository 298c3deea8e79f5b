"""What a chat's next turn finds in the prefix cache, and how many idle conversations stay there."""

from dataclasses import replace

from vllm_kvcompress.commands.plan.forecast import Forecast, NextHits, WarmConversations, Workload
from vllm_kvcompress.commands.plan.request import PlannedRequest, prefill_schedule
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.planning.memory import Sizes, scratch_blocks
from vllm_kvcompress.settings.config import CompressionConfig

_FP8_BYTES = 1


def next_hits(request: PlannedRequest) -> NextHits:
    """Return the tokens of a request that the next turn of its chat finds in the prefix cache.

    Blocks enter the cache until the request is packed for the first time. The next turn must
    compute the queries that its method reads; its new message is assumed to contain them. With
    ``--kv-reuse``, packed pages are in the cache too, and no query is needed.
    """
    settings, load, block = request.settings, request.load, request.sizes.block_size
    hit = load.cached
    if settings.enabled:
        hit = min(_cacheable_tokens(request), hit)
        window = max(settings.resolved_window, 1)
        following = replace(load, prompt=load.prompt + load.output + window)
        prefill = prefill_schedule(settings, request.sizes, following, request.page_tokens)
        if prefill is not None:
            hit = prefill.longest_prefix_hit(hit)
        elif settings.decode.budget is not None and Reads.COLUMN_SUMS in settings.method.reads:
            hit = 0
        if settings.reuses_pages and packed_tokens(
            settings,
            load,
            block,
            request.page_tokens or block,
            packs_prompt=request.plan is not None,
        ):
            hit = load.cached
    return NextHits(off=load.cached // block * block, on=hit // block * block)


def _cacheable_tokens(request: PlannedRequest) -> int:
    """Return the tokens of a request that may enter the prefix cache.

    They are those computed when it is first packed, or all if it never is. A prompt is packed into
    fresh blocks, an output into the request's own last blocks, which leave the cache.
    """
    load, output = request.load, request.output
    if request.pieces is not None:
        return request.pieces.first_end
    if request.plan is not None:
        return request.plan.packed_end
    if output is None:
        return load.cached
    footprint = request.unpacked_footprint(int(not output.scored))
    for at in range(load.prompt + 1, load.cached + 1):
        if (packing := output.plan(footprint, at)) is not None:
            return max(at - packing.blocks * request.sizes.block_size, 0)
    return load.cached


def packed_tokens(
    settings: CompressionConfig,
    load: Workload,
    block_size: int,
    page_tokens: int,
    *,
    packs_prompt: bool,
) -> int:
    """Return the tokens that a request leaves in packed pages, its first block included; or 0.

    On a grid, a prompt of less than one cell is packed with its output. One that stays uncompressed
    for another reason is not.

    Args:
        settings: settings that reuse pages.
        load: the request.
        block_size: tokens in an ordinary block.
        page_tokens: tokens in a packed page.
        packs_prompt: whether the prompt is compressed.
    """
    interval, cell = settings.output_interval(page_tokens), settings.grid_cell(page_tokens)
    packed = 0
    if cell is None:
        if packs_prompt:
            packed = max(load.prompt - block_size, 0) // page_tokens * page_tokens
    elif not packs_prompt and max(load.prompt + 1, settings.resolved_min_prompt) > (
        block_size + cell
    ):
        return 0
    packed += max(load.cached - block_size - packed, 0) // interval * interval
    return block_size + packed if packed else 0


def warm_conversations(
    settings: CompressionConfig, sizes: Sizes, forecast: Forecast
) -> WarmConversations:
    """Return how many idle conversations of the forecast's length stay in its pools."""
    load, block = forecast.load, forecast.block_size
    blocks_off = blocks_on = load.cached // block
    page, packs_prompt = forecast.page_tokens, forecast.left_whole is None
    if tokens := packed_tokens(settings, load, block, page, packs_prompt=packs_prompt):
        blocks_on = 1 + (tokens - block) // page + (load.cached - tokens) // block
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
        scratch_bytes=scratch_blocks(sizes, settings) * sizes.block_bytes,
    )
