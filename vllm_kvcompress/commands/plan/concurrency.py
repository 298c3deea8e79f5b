"""How many requests fit in a KV pool, with and without compression."""

from contextlib import suppress

from vllm_kvcompress.commands.plan.drafts import Drafts
from vllm_kvcompress.commands.plan.forecast import (
    Concurrency,
    Forecast,
    InPieces,
    RequestBlocks,
    Workload,
    WorstCase,
)
from vllm_kvcompress.commands.plan.gpu_memory import Defaults
from vllm_kvcompress.commands.plan.model_shape import ModelShape
from vllm_kvcompress.commands.plan.options import PlanOptions
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.layer_groups import LayerGroups
from vllm_kvcompress.planning.memory import (
    HOST_SLOT_BLOCKS,
    Sizes,
    extra_bytes,
    host_slots,
    reserved_bytes,
    sum_bytes_per_block,
    table_bytes,
)
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.planning.request import PlannedRequest
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import largest_budgets
from vllm_kvcompress.settings.packed_dtype import AUTO, K4V3

_OFF = CompressionConfig()
_MAX_SEARCHED_BLOCKS = 200
"""Prompt lengths that `_pays_from` tries, in blocks above the shortest compressed prompt."""


def sizes_on_rank(
    shape: ModelShape,
    options: PlanOptions,
    block_size: int,
    defaults: Defaults,
    drafts: Drafts,
) -> Sizes:
    """Return the sizes of one rank's part of a model.

    Args:
        shape: shape of the model over all ranks.
        options: the command's options.
        block_size: tokens per block.
        defaults: the server's defaults.
        drafts: how the server drafts.

    Raises:
        ConfigError: The heads do not divide among ranks, or the layers among stages.
    """
    ranks, stages = options.ranks, options.stages
    kv = shape.kv_heads
    if shape.heads % ranks or (kv % ranks if kv >= ranks else ranks % kv):
        raise ConfigError(
            f"--tp must divide the model's {shape.heads} heads, and must divide its {kv} KV heads"
            f" or be a multiple of them; got {ranks}"
        )
    groups = shape.groups
    if shape.layers % stages:
        raise ConfigError(
            f"--pp must divide the model's {shape.layers} layers, because all stages hold the same"
            f" number of blocks; got {stages}"
        )
    if stages > 1:
        groups = LayerGroups(full=tuple(range(shape.layers // stages)))
    max_requests = options.requests or defaults.max_num_seqs
    return Sizes(
        layers=len(groups.full),
        groups=groups,
        in_flight=defaults.batched_tokens,
        heads=shape.heads // ranks,
        kv_heads=max(kv // ranks, 1),
        head_dim=shape.head_dim,
        itemsize=shape.itemsize,
        cache_itemsize=shape.stored,
        longest=options.longest or options.length + options.output,
        block_size=block_size,
        max_requests=max_requests,
        max_graph_rows=min(2 * max_requests * (1 + drafts.tokens), 512)
        if options.device == "cuda"
        else 0,
        max_drafts=drafts.max_drafts(options.device),
        draft_layers=drafts.layers,
        draft_model_slots=drafts.model_slots,
    )


def planned_request(settings: CompressionConfig, sizes: Sizes, load: Workload) -> PlannedRequest:
    """Return one request of a workload, and how the engine packs it."""
    page_tokens = None
    if settings.enabled:
        page_tokens = packed_page_tokens(settings, sizes.block_size, sizes.key_itemsize)
    return PlannedRequest(
        settings=settings,
        num_layers=sizes.layers,
        block_size=sizes.block_size,
        page_tokens=page_tokens,
        prompt=load.prompt,
        output=load.output,
        spans=load.spans,
        draft_layers=sizes.draft_layers,
    )


def _blocks(request: PlannedRequest, sizes: Sizes) -> RequestBlocks:
    """Return the blocks that the request holds in all layers."""
    plan, block = request.plan, sizes.block_size
    freed = 0 if plan is None else plan.freed_blocks
    prefill_end = -(-request.prompt // block)
    prefill = -(-(request.prompt + sizes.draft_model_slots) // block)
    packed_at = request.prompt if plan is None else plan.tokens
    looking = decoding = -(-(packed_at + sizes.draft_model_slots) // block) - freed
    if request.pieces is not None:
        prefill, prefill_end = request.pieces.max_blocks, request.pieces.blocks_at_end
    if plan is not None and request.lookahead is not None:
        looking = request.lookahead.blocks_when_due(prefill_end)
        looking += request.added_blocks(packed_at, sizes.draft_model_slots)
        prefill = max(prefill, looking)
    end, awaited = request.end_blocks, request.lookahead_tokens
    end += request.added_blocks(request.cached, sizes.draft_slots)
    decode_blocks = (request.output - awaited) * (decoding + end) / 2
    mean = (awaited * looking + decode_blocks) / request.output
    others, others_at_end = sizes.other_blocks(request.prompt), sizes.other_blocks(request.cached)
    return RequestBlocks(
        prefill=prefill + sizes.other_blocks(request.prompt, sizes.in_flight),
        looking=looking + others,
        decoding=decoding + others,
        end=end + others_at_end,
        mean=mean + others_at_end,
    )


def forecast(
    settings: CompressionConfig,
    sizes: Sizes,
    load: Workload,
    *,
    pool_bytes: int | None,
    tables_from_pool: bool,
) -> Forecast:
    """Return the blocks and memory of a workload, and how many of its requests fit.

    Args:
        settings: settings of the engine.
        sizes: sizes of one rank.
        load: the workload.
        pool_bytes: KV cache of one GPU without compression, None if unknown.
        tables_from_pool: whether the memory of compression is taken from the pool, as on a GPU.

    Raises:
        ConfigError: Not even one prompt fits.
    """
    request = planned_request(settings, sizes, load)
    off, on = _blocks(planned_request(_OFF, sizes, load), sizes), _blocks(request, sizes)
    clients_choose = bool(settings.allow_override or settings.alias)
    asks, largest = _largest_request(settings, sizes, load) if clients_choose else ("", on)
    num_blocks = None if pool_bytes is None else pool_bytes // sizes.block_bytes or None
    pool_off = pool_on = pool_largest = None
    if pool_bytes is None:
        extra = extra_bytes(sizes, settings)
    else:
        if tables_from_pool:
            extra = reserved_bytes(sizes, settings, pool_bytes)
            remaining = pool_bytes - extra
        else:
            extra = extra_bytes(sizes, settings, num_blocks)
            extra += (num_blocks or 0) * sum_bytes_per_block(sizes, settings)
            remaining = pool_bytes
        # A pool for prompts in pieces may be too small for an uncompressed prompt.
        none_may_fit = settings.pieces.max_whole is not None
        pool_off = _fit(pool_bytes, sizes, off, none_may_fit=none_may_fit)
        pool_on = _fit(remaining, sizes, on)
        pool_largest = _fit(remaining, sizes, largest, none_may_fit=none_may_fit)
    groups = sizes.groups
    in_auto = None
    if request.page_tokens is not None:
        auto_settings = settings.variant(packed_dtype=AUTO)
        with suppress(ConfigError):
            in_auto = forecast(
                auto_settings,
                sizes,
                load,
                pool_bytes=pool_bytes,
                tables_from_pool=tables_from_pool,
            )
    return Forecast(
        load=load,
        block_size=sizes.block_size,
        block_bytes=sizes.block_bytes,
        left_whole=request.left_whole,
        kept_tokens=request.kept_tokens,
        budget_tokens=settings.tokens_per_layer(load.prompt) if settings.enabled else load.prompt,
        packed_dtype=AUTO if request.page_tokens is None else K4V3,
        page_tokens=request.page_tokens or sizes.block_size,
        pages=0 if request.plan is None else request.plan.pages,
        lookahead=request.lookahead_tokens,
        off=off,
        on=on,
        table_bytes=table_bytes(sizes, settings, num_blocks),
        extra_bytes=extra,
        pool_off=pool_off,
        pool_on=pool_on,
        worst=WorstCase(asks=asks, blocks=largest, pool=pool_largest) if asks else None,
        group=groups.size if groups is not None and groups.num_uncompressed else None,
        in_pieces=_in_pieces(request, load, num_blocks),
        with_states=groups is not None and groups.stateful > 0,
        pays_from=_pays_from(request, sizes),
        parked=None
        if settings.park is None
        else host_slots(settings.park, sizes.block_bytes) // -(-on.end // HOST_SLOT_BLOCKS),
        auto=in_auto,
    )


def _pays_from(request: PlannedRequest, sizes: Sizes) -> int | None:
    """Return the prompt length in tokens from which compression always frees a block.

    Returns None for models without states, and if no such length is found. Checks only prompts
    without a tail: among prompts with the same number of full blocks, they keep the most pages.
    """
    settings = request.settings
    if sizes.groups is None or not sizes.groups.stateful or not settings.enabled:
        return None
    block, min_tokens = request.block_size, max(settings.resolved_min_prompt, 1)
    min_full = min_tokens // block
    for full in range(min_full + _MAX_SEARCHED_BLOCKS, min_full - 1, -1):
        tokens = max(full * block, min_tokens)
        plan = settings.page_plan(request.num_layers, tokens, block, (), request.page_tokens)
        if plan is None or plan.freed_blocks <= 0:
            return (full + 1) * block if full < min_full + _MAX_SEARCHED_BLOCKS else None
    return min_tokens


def _in_pieces(request: PlannedRequest, load: Workload, num_blocks: int | None) -> InPieces | None:
    if request.pieces is None:
        return None
    limit = request.pieces.boundary_limit
    if limit is None:
        return InPieces(held_tokens=None, roomy=None)
    if limit.protection_too_large:
        raise ConfigError(
            f"--protected {load.protected} is more than a prompt in pieces can hold between pieces;"
            " raise --kv-max-whole, or protect fewer tokens"
        )
    held_tokens = limit.held_pages * request.block_size / request.num_layers
    max_whole = limit.recommended_max_whole
    fits = num_blocks is None or -(-max_whole // request.block_size) < num_blocks
    helps = max_whole < load.prompt and fits
    return InPieces(held_tokens=held_tokens, roomy=max_whole if helps else None)


def _largest_request(
    settings: CompressionConfig, sizes: Sizes, load: Workload
) -> tuple[str, RequestBlocks]:
    """Return the largest request that clients may choose: a description, and its blocks."""
    methods = {settings.compress, *settings.allow_override}
    if settings.allow_override:
        methods |= {alias.method for alias in settings.alias}
    candidates: list[tuple[str, CompressionConfig]] = [("off", _OFF)] * ("off" in methods)
    candidates += [
        (f"the model name {alias.name}", settings.alias_settings(alias) or _OFF)
        for alias in settings.alias
    ]
    for method in sorted(methods - {"off"}):
        budgets = largest_budgets(settings, method)
        for budget, packed_dtype in (*budgets.named, *budgets.granted):
            asks = f"{method} at {budget}" + (f" in {packed_dtype}" if packed_dtype else "")
            # Requests cannot choose a budget below the method's window.
            with suppress(ConfigError):
                candidates.append((asks, settings.variant(method, budget, packed_dtype)))
    requests = [
        (asks, _blocks(planned_request(variant, sizes, load), sizes))
        for asks, variant in candidates
    ]
    return max(requests, key=lambda request: request[1].end)


def _fit(
    pool_bytes: int, sizes: Sizes, request: RequestBlocks, *, none_may_fit: bool = False
) -> Concurrency:
    """Return how many copies of `request` fit in a pool.

    Raises:
        ConfigError: No request fits, unless `none_may_fit`.
    """
    # One block of the pool is vLLM's null block, which no request gets.
    blocks = max(pool_bytes // sizes.block_bytes - 1, 0)
    max_requests = sizes.max_requests
    if blocks < request.prefill and none_may_fit:
        max_requests = 0
    elif blocks < request.prefill:
        min_gib = (request.prefill + 1) * sizes.block_bytes / 2**30
        raise ConfigError(
            f"the KV pool must hold one uncompressed prompt during prefill: {request.prefill}"
            f" blocks, but the pool has {blocks}; give at least {min_gib:.2f} GiB in addition to"
            " the memory of compression, a shorter --len, or --kv-max-whole to compress the prompt"
            " in pieces"
        )
    return Concurrency(
        pool_bytes=pool_bytes,
        blocks=blocks,
        decoding=min(blocks // request.end, max_requests),
        beside_prefill=min(1 + (blocks - request.prefill) // request.end, max_requests),
        most=sizes.max_requests,
    )
