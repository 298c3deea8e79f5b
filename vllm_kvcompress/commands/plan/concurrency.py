"""KV blocks that a request needs with and without compression, and how many requests fit.

Computed from lengths alone with the engine's own page plans, so the blocks equal the engine's.
"""

from contextlib import suppress
from dataclasses import replace

from vllm_kvcompress.commands.plan.forecast import (
    Concurrency,
    Forecast,
    InPieces,
    NextHits,
    RequestBlocks,
    Workload,
    WorstCase,
)
from vllm_kvcompress.commands.plan.model_shape import ModelShape
from vllm_kvcompress.commands.plan.warm import packed_tokens
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan, mostly_protected
from vllm_kvcompress.planning.layer_groups import LayerGroups
from vllm_kvcompress.planning.memory import (
    Sizes,
    extra_bytes,
    reserved_bytes,
    sum_bytes_per_block,
    table_bytes,
)
from vllm_kvcompress.planning.packed_pages import mean_layer_tokens, packed_page_tokens
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.schedules.outputs import OutputGroupSchedule, OutputSchedule
from vllm_kvcompress.schedules.pieces import PiecewiseSchedule, piece_schedule
from vllm_kvcompress.schedules.prompt import PromptSchedule
from vllm_kvcompress.schedules.request import PrefillSchedule, lookahead_tokens_of
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import largest_budgets
from vllm_kvcompress.settings.packed_dtype import AUTO, K4V3

_MAX_SEARCHED_BLOCKS = 200
"""Prompt lengths that `_pays_from` tries, in blocks above the shortest compressed prompt."""


def sizes_on_rank(
    shape: ModelShape,
    *,
    ranks: int,
    stages: int = 1,
    longest: int,
    block_size: int,
    max_requests: int,
    graphs: bool,
    in_flight: int = 1,
) -> Sizes:
    """Return the sizes of one rank's part of a model.

    Args:
        shape: shape of the model over all ranks.
        ranks: tensor-parallel size.
        stages: pipeline-parallel size.
        longest: tokens of the longest sequence.
        block_size: tokens per block.
        max_requests: concurrent requests.
        graphs: whether CUDA graphs are captured, which pads batches.
        in_flight: tokens per step.

    Raises:
        ConfigError: The heads do not divide among ranks, or the layers among stages.
    """
    kv = shape.kv_heads
    if shape.heads % ranks or (kv % ranks if kv >= ranks else ranks % kv):
        raise ConfigError(
            f"--tp must divide the model's {shape.heads} heads, and must divide its {kv} KV heads"
            f" or be a multiple of them; got {ranks}"
        )
    groups = shape.groups
    if stages > 1 and groups.num_uncompressed:
        raise ConfigError(
            "pipeline parallelism is not supported for models with sliding windows or states; set"
            f" --pp 1 and raise --tp, got --pp {stages}"
        )
    if shape.layers % stages:
        raise ConfigError(
            f"--pp must divide the model's {shape.layers} layers, because all stages hold the same"
            f" number of blocks; got {stages}"
        )
    if stages > 1:
        groups = LayerGroups(full=tuple(range(shape.layers // stages)))
    return Sizes(
        layers=len(groups.full),
        groups=groups,
        in_flight=in_flight,
        heads=shape.heads // ranks,
        kv_heads=max(kv // ranks, 1),
        head_dim=shape.head_dim,
        itemsize=shape.itemsize,
        cache_itemsize=shape.stored,
        longest=longest,
        block_size=block_size,
        max_requests=max_requests,
        max_graph_rows=min(2 * max_requests, 512) if graphs else 0,
    )


def forecast(
    sizes: Sizes,
    settings: CompressionConfig,
    load: Workload,
    *,
    pool_bytes: int | None = None,
    tables_from_pool: bool = True,
) -> Forecast:
    """Return the blocks and memory of a workload, and how many of its requests fit.

    Args:
        sizes: sizes of one rank.
        settings: compression settings.
        load: the requests.
        pool_bytes: KV cache of one GPU without compression, None if unknown.
        tables_from_pool: whether the memory of compression is taken from the pool, as on a GPU.

    Raises:
        ConfigError: Not even one prompt fits.
    """
    plan, reason = _page_plan(settings, sizes, load)
    page_tokens = _page_tokens(settings, sizes)
    off, on = _blocks(load, sizes, None, None), _blocks(load, sizes, settings, plan)
    clients_choose = bool(settings.allow_override or settings.alias)
    asks, largest = _largest_request(settings, sizes, load) if clients_choose else ("", on)
    num_blocks = None if pool_bytes is None else pool_bytes // sizes.block_bytes or None
    extra = extra_bytes(sizes, settings, num_blocks)
    if pool_bytes is not None:
        extra += (num_blocks or 0) * sum_bytes_per_block(sizes, settings)
        if tables_from_pool:
            extra = reserved_bytes(sizes, settings, pool_bytes)
    pool_off = pool_on = pool_largest = None
    if pool_bytes is not None:
        remaining = pool_bytes - extra if tables_from_pool else pool_bytes
        # A pool for prompts in pieces may be too small for an uncompressed prompt.
        none_may_fit = settings.pieces.max_whole is not None
        pool_off = _fit(pool_bytes, sizes, off, none_may_fit=none_may_fit)
        pool_on = _fit(remaining, sizes, on)
        pool_largest = _fit(remaining, sizes, largest, none_may_fit=none_may_fit)
    return Forecast(
        load=load,
        block_size=sizes.block_size,
        block_bytes=sizes.block_bytes,
        left_whole=reason,
        kept_tokens=_kept_tokens(load, plan),
        budget_tokens=settings.tokens_per_layer(load.prompt) if settings.enabled else load.prompt,
        packed_dtype=AUTO if page_tokens is None else K4V3,
        page_tokens=page_tokens or sizes.block_size,
        pages=0 if plan is None else plan.pages,
        lookahead=0 if plan is None else plan.tokens - load.prompt,
        off=off,
        on=on,
        table_bytes=table_bytes(sizes, settings, num_blocks),
        extra_bytes=extra,
        pool_off=pool_off,
        pool_on=pool_on,
        worst=WorstCase(asks=asks, blocks=largest, pool=pool_largest) if asks else None,
        group=sizes.groups.size
        if sizes.groups is not None and sizes.groups.num_uncompressed
        else None,
        in_pieces=_in_pieces(settings, sizes, load, num_blocks),
        with_states=sizes.groups is not None and sizes.groups.stateful > 0,
        pays_from=_pays_from(settings, sizes),
        auto=_in_auto(settings, sizes, load, pool_bytes, tables_from_pool=tables_from_pool),
    )


def _in_auto(
    settings: CompressionConfig,
    sizes: Sizes,
    load: Workload,
    pool_bytes: int | None,
    *,
    tables_from_pool: bool,
) -> Forecast | None:
    """Return the forecast at the same budget in the cache's dtype; None if it is packed so."""
    if _page_tokens(settings, sizes) is None:
        return None
    in_auto = settings.variant(packed_dtype=AUTO)
    with suppress(ConfigError):
        return forecast(
            sizes, in_auto, load, pool_bytes=pool_bytes, tables_from_pool=tables_from_pool
        )
    return None


def _page_tokens(settings: CompressionConfig, sizes: Sizes) -> int | None:
    """Return the tokens in a packed page; None if it holds the tokens of an ordinary page."""
    if not settings.enabled:
        return None
    return packed_page_tokens(settings, sizes.block_size, sizes.key_itemsize)


def _pays_from(settings: CompressionConfig, sizes: Sizes) -> int | None:
    """Return the prompt length in tokens from which compression always frees a block.

    Returns None for models without states, and if no such length is found. Checks only prompts
    without a tail: among prompts with the same number of full blocks, they keep the most pages.
    """
    if sizes.groups is None or not sizes.groups.stateful or not settings.enabled:
        return None
    block, min_tokens = sizes.block_size, max(settings.resolved_min_prompt, 1)
    min_full = min_tokens // block
    for full in range(min_full + _MAX_SEARCHED_BLOCKS, min_full - 1, -1):
        tokens = max(full * block, min_tokens)
        plan = settings.page_plan(sizes.layers, tokens, block, (), _page_tokens(settings, sizes))
        if plan is None or plan.freed_blocks <= 0:
            return (full + 1) * block if full < min_full + _MAX_SEARCHED_BLOCKS else None
    return min_tokens


def _piece_schedule(
    settings: CompressionConfig, sizes: Sizes, load: Workload
) -> PiecewiseSchedule | None:
    """Return the schedule of the prompt in pieces; None if it is not compressed before its end."""
    if not settings.enabled:
        return None
    if settings.reuses_pages and (
        load.prompt < settings.resolved_min_prompt or load.output < settings.resolved_min_output
    ):
        return None
    page_tokens = _page_tokens(settings, sizes)
    return piece_schedule(
        settings, sizes.layers, sizes.block_size, load.prompt, load.spans, page_tokens
    )


def _in_pieces(
    settings: CompressionConfig, sizes: Sizes, load: Workload, num_blocks: int | None
) -> InPieces | None:
    pieces = _piece_schedule(settings, sizes, load)
    if pieces is None:
        return None
    limit = pieces.boundary_limit
    if limit is None:
        return InPieces(held_tokens=None, roomy=None)
    if limit.protection_too_large:
        raise ConfigError(
            f"--protected {load.protected} is more than a prompt in pieces can hold between pieces;"
            " raise --kv-max-whole, or protect fewer tokens"
        )
    held_tokens = limit.held_pages * sizes.block_size / sizes.layers
    max_whole = limit.recommended_max_whole
    fits = num_blocks is None or -(-max_whole // sizes.block_size) < num_blocks
    helps = max_whole < load.prompt and fits
    return InPieces(held_tokens=held_tokens, roomy=max_whole if helps else None)


def _page_plan(
    settings: CompressionConfig, sizes: Sizes, load: Workload
) -> tuple[PagePlan | None, str | None]:
    """Return the page plan of the prompt, and why there is none."""
    if not settings.enabled:
        return None, "only requests that choose a method are compressed"
    plan, prefill = _prompt_plan(settings, sizes, load), _prefill_schedule(settings, sizes, load)
    lookahead_tokens = 0 if prefill is None else lookahead_tokens_of(prefill)
    reason = None
    if prefill is None or not prefill.in_pieces:
        reason = _uncompressed_reason(settings, load, plan, lookahead_tokens)
    if reason is None and plan is not None and lookahead_tokens:
        lookahead = _lookahead(settings, sizes, load)
        plan = lookahead.plan_at(
            KVFootprint(num_layers=sizes.layers, block_size=sizes.block_size), lookahead.due
        )
    return (plan, None) if reason is None else (None, reason)


def _prompt_plan(settings: CompressionConfig, sizes: Sizes, load: Workload) -> PagePlan | None:
    return settings.page_plan(
        sizes.layers, load.prompt, sizes.block_size, load.spans, _page_tokens(settings, sizes)
    )


def _prefill_schedule(
    settings: CompressionConfig, sizes: Sizes, load: Workload
) -> PrefillSchedule | None:
    """Return the schedule that packs the prompt, a look-ahead aside; None if nothing does."""
    if (pieces := _piece_schedule(settings, sizes, load)) is not None:
        return pieces
    plan = _prompt_plan(settings, sizes, load)
    return None if plan is None else PromptSchedule(settings=settings, page_plan=plan)


def next_hits(settings: CompressionConfig, sizes: Sizes, load: Workload) -> NextHits:
    """Return the tokens of a request that the next turn of its chat finds in the prefix cache.

    Blocks enter the cache until the request is packed for the first time. The next turn must
    compute the queries that its method reads; its new message is assumed to contain them. With
    ``--kv-reuse``, packed pages are in the cache too, and no query is needed.
    """
    hit, block = load.cached, sizes.block_size
    if settings.enabled:
        hit = min(_cacheable_tokens(settings, sizes, load), hit)
        window = max(settings.resolved_window, 1)
        following = replace(load, prompt=load.prompt + load.output + window)
        if (prefill := _prefill_schedule(settings, sizes, following)) is not None:
            hit = prefill.longest_prefix_hit(hit)
        elif settings.decode.budget is not None and Reads.COLUMN_SUMS in settings.method.reads:
            hit = 0
        if settings.reuses_pages:
            packs_prompt = _page_plan(settings, sizes, load)[0] is not None
            page_tokens = packed_page_tokens(settings, block, sizes.key_itemsize) or block
            if packed_tokens(settings, load, block, page_tokens, packs_prompt=packs_prompt):
                hit = load.cached
    return NextHits(off=load.cached // block * block, on=hit // block * block)


def _cacheable_tokens(settings: CompressionConfig, sizes: Sizes, load: Workload) -> int:
    """Return the tokens of a request that may enter the prefix cache.

    They are those computed when it is first packed, or all if it never is. A prompt is packed into
    fresh blocks, an output into the request's own last blocks, which leave the cache.
    """
    if (pieces := _piece_schedule(settings, sizes, load)) is not None:
        return pieces.first_end
    if (plan := _page_plan(settings, sizes, load)[0]) is not None:
        return plan.packed_end
    if (output := _output_schedule(settings, sizes, load)) is None:
        return load.cached
    footprint = _unpacked_footprint(sizes, int(not output.scored))
    for at in range(load.prompt + 1, load.cached + 1):
        if (packing := output.plan(footprint, at)) is not None:
            return max(at - packing.blocks * sizes.block_size, 0)
    return load.cached


def _unpacked_footprint(sizes: Sizes, leading_blocks: int) -> KVFootprint:
    return KVFootprint(
        num_layers=sizes.layers, block_size=sizes.block_size, leading_blocks=leading_blocks
    )


def _lookahead(settings: CompressionConfig, sizes: Sizes, load: Workload) -> LookaheadSchedule:
    return LookaheadSchedule(
        settings=settings,
        num_layers=sizes.layers,
        block_size=sizes.block_size,
        prompt=load.prompt,
        max_tokens=load.prompt + load.output,
        prefilled=load.prompt,
        spans=load.spans,
        page_tokens=_page_tokens(settings, sizes),
    )


def _kept_tokens(load: Workload, plan: PagePlan | None) -> float:
    """Return the prompt tokens that a layer keeps, without the output tokens in the plan."""
    if plan is None:
        return load.prompt
    return mean_layer_tokens(plan) - (plan.tokens - load.prompt)


def _largest_request(
    settings: CompressionConfig, sizes: Sizes, load: Workload
) -> tuple[str, RequestBlocks]:
    """Return the largest request that clients may choose: a description, and its blocks."""
    methods = {settings.compress, *settings.allow_override}
    if settings.allow_override:
        methods |= {alias.method for alias in settings.alias}
    candidates: list[tuple[str, CompressionConfig | None]] = [("off", None)] * ("off" in methods)
    candidates += [
        (f"the model name {alias.name}", settings.alias_settings(alias)) for alias in settings.alias
    ]
    for method in sorted(methods - {"off"}):
        budgets = largest_budgets(settings, method)
        for budget, packed_dtype in (*budgets.named, *budgets.granted):
            asks = f"{method} at {budget}" + (f" in {packed_dtype}" if packed_dtype else "")
            # Requests cannot choose a budget below the method's window.
            with suppress(ConfigError):
                candidates.append((asks, settings.variant(method, budget, packed_dtype)))
    requests = [
        (
            asks,
            _blocks(load, sizes, variant, _page_plan(variant, sizes, load)[0] if variant else None),
        )
        for asks, variant in candidates
    ]
    return max(requests, key=lambda request: request[1].end)


def _uncompressed_reason(
    settings: CompressionConfig, load: Workload, plan: PagePlan | None, lookahead: int
) -> str | None:
    """Return why the prompt is not compressed, or None if it is.

    Args:
        plan: page plan of the prompt without its look-ahead.
        lookahead: output tokens that compressing it waits for.
    """
    if load.prompt < settings.resolved_min_prompt:
        return f"it is shorter than --kv-min-prompt {settings.resolved_min_prompt}"
    if load.output < settings.resolved_min_output:
        return f"its output is shorter than --kv-min-output {settings.resolved_min_output}"
    if load.output < lookahead + 2 and not settings.reuses_pages:
        return f"its output ends within the look-ahead of {lookahead} tokens"
    if plan is None and mostly_protected(load.spans, load.prompt):
        return "more than half of it is protected"
    if plan is None:
        return "compressing it to this budget would free no block"
    return None


def _blocks(
    load: Workload, sizes: Sizes, settings: CompressionConfig | None, plan: PagePlan | None
) -> RequestBlocks:
    """Return the blocks of a request with `settings`, None for off, and the page plan `plan`."""
    block = sizes.block_size
    freed = 0 if plan is None else plan.freed_blocks
    prefill, end = -(-load.prompt // block), -(-load.cached // block) - freed
    packed_at = load.prompt if plan is None else plan.tokens
    looking = decoding = -(-packed_at // block) - freed
    prefill_end = prefill
    if settings is not None and (pieces := _piece_schedule(settings, sizes, load)) is not None:
        prefill, prefill_end = pieces.max_blocks, pieces.blocks_at_end
    if settings is not None and packed_at > load.prompt:
        looking = _lookahead(settings, sizes, load).blocks_when_due(prefill_end)
        prefill = max(prefill, looking)
    lookahead_steps = packed_at - load.prompt
    schedule = None
    if settings is not None and settings.enabled:
        schedule = _output_schedule(settings, sizes, load)
    if schedule is not None:
        leading_blocks = int(not schedule.scored) if plan is None else plan.leading_blocks
        footprint = _unpacked_footprint(sizes, leading_blocks)
        if plan is not None:
            footprint.pack(plan, plan.full_blocks)
        packed = 0 if plan is None else plan.blocks
        end = schedule.max_blocks(footprint, packed=packed, tokens=load.cached)
    decode_steps = load.output - lookahead_steps
    mean = (lookahead_steps * looking + decode_steps * (decoding + end) / 2) / load.output
    return RequestBlocks(
        prefill=prefill + sizes.other_blocks(load.prompt, sizes.in_flight),
        looking=looking + sizes.other_blocks(load.prompt),
        decoding=decoding + sizes.other_blocks(load.prompt),
        end=end + sizes.other_blocks(load.cached),
        mean=mean + sizes.other_blocks(load.cached),
    )


def _output_schedule(
    settings: CompressionConfig, sizes: Sizes, load: Workload
) -> OutputSchedule | OutputGroupSchedule | None:
    """Return the schedule that packs a request's output, or None if its cache grows."""
    page_tokens, max_tokens = _page_tokens(settings, sizes), load.prompt + load.output
    if settings.packs_outputs and page_tokens is not None:
        return OutputGroupSchedule(
            settings=settings, max_tokens=max_tokens, page_tokens=page_tokens
        )
    if settings.decode.budget is None:
        return None
    return OutputSchedule(
        settings=settings, prefilled=load.prompt, max_tokens=max_tokens, spans=load.spans
    )


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
