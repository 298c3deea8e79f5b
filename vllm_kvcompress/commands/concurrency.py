"""What a request's KV cache takes with and without compression, and how many requests fit.

Arithmetic on lengths alone, by the page plan that the engine packs by: its blocks are the engine's.
"""

from contextlib import suppress

from vllm_kvcompress.commands.forecast import (
    Blocks,
    Concurrency,
    Forecast,
    InPieces,
    Load,
    Worst,
)
from vllm_kvcompress.commands.model_shape import ModelShape
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import PagePlan, mostly_protected
from vllm_kvcompress.planning.kv_footprint import KVFootprint
from vllm_kvcompress.planning.layer_groups import LayerGroups
from vllm_kvcompress.planning.memory import (
    Sizes,
    bytes_beside,
    extra_bytes,
    sums_per_block,
    table_bytes,
)
from vllm_kvcompress.planning.pieces import pieces_of
from vllm_kvcompress.planning.schedules import EveryInterval, LookAhead
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import largest_budgets

_MOST_BLOCKS = 200
"""Blocks of the longest prompt that is asked whether it gives a block back."""


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
    """One rank's part of a model.

    Args:
        ranks: tensor-parallel size.
        stages: pipeline-parallel size.
        graphs: whether CUDA graphs are captured, whose batches are padded.
        in_flight: tokens that are computed at once.

    Raises:
        ConfigError: the heads do not divide among the ranks, or the layers among the stages.
    """
    kv = shape.kv_heads
    if shape.heads % ranks or (kv % ranks if kv >= ranks else ranks % kv):
        raise ConfigError(
            f"--tp must divide the model's {shape.heads} heads, and divide its {kv} KV heads or be"
            f" a multiple of them; got {ranks}"
        )
    groups = shape.groups
    if stages > 1 and groups.others:
        raise ConfigError(
            "pipeline stages of models with sliding windows or states are refused; set --pp 1 and"
            f" raise --tp, got --pp {stages}"
        )
    if shape.layers % stages:
        raise ConfigError(
            f"--pp must divide the model's {shape.layers} layers, since all stages take the same"
            f" blocks; got {stages}"
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
        stored=shape.stored,
        longest=longest,
        block_size=block_size,
        max_requests=max_requests,
        captured=min(2 * max_requests, 512) if graphs else 0,
    )


def forecast(
    sizes: Sizes,
    settings: CompressionConfig,
    load: Load,
    *,
    pool_bytes: int | None = None,
    tables_from_pool: bool = True,
) -> Forecast:
    """What `load` takes, and how much of it fits.

    Args:
        pool_bytes: what vLLM gives the KV cache of one GPU, without compression.
        tables_from_pool: whether what compression takes comes off that, as it does on a GPU.

    Raises:
        ConfigError: a single prompt does not fit.
    """
    block = sizes.block_size
    plan, whole = _plan(settings, sizes, load)
    off, on = _blocks(load, sizes, None, None), _blocks(load, sizes, settings, plan)
    may_ask = bool(settings.allow_override or settings.alias)
    asks, largest = _most_demanding(settings, sizes, load) if may_ask else ("", on)
    blocks = None if pool_bytes is None else pool_bytes // sizes.block_bytes or None
    extra = extra_bytes(sizes, settings, blocks)
    if pool_bytes is not None:
        extra += (blocks or 0) * sums_per_block(sizes, settings)
        if tables_from_pool:
            extra = bytes_beside(sizes, settings, pool_bytes)
    pools: list[Concurrency | None] = [None, None, None]
    if pool_bytes is not None:
        left = pool_bytes - extra if tables_from_pool else pool_bytes
        # a pool for prompts in pieces need not hold one that stands whole
        small = settings.max_whole is not None
        pools = [
            _fit(pool_bytes, sizes, off, none_may_fit=small),
            _fit(left, sizes, on),
            _fit(left, sizes, largest, none_may_fit=small),
        ]
    return Forecast(
        load=load,
        block_size=block,
        block_bytes=sizes.block_bytes,
        left_whole=whole,
        kept_tokens=_kept_tokens(load, plan),
        pages=0 if plan is None else plan.pages,
        off=off,
        on=on,
        table_bytes=table_bytes(sizes, settings, blocks),
        extra_bytes=extra,
        pool_off=pools[0],
        pool_on=pools[1],
        worst=Worst(asks=asks, blocks=largest, pool=pools[2]) if asks else None,
        group=sizes.groups.size if sizes.groups is not None and sizes.groups.others else None,
        in_pieces=_in_pieces(settings, sizes, load, blocks),
        with_states=sizes.groups is not None and sizes.groups.stateful > 0,
        pays_from=_pays_from(settings, sizes),
    )


def _pays_from(settings: CompressionConfig, sizes: Sizes) -> int | None:
    """Tokens from which on every prompt gives a block back, where layers keep a state.

    Of prompts with as many full blocks, the one without a tail keeps the most in pages.
    """
    if sizes.groups is None or not sizes.groups.stateful or not settings.enabled:
        return None
    block, least = sizes.block_size, max(settings.min_prompt, 1)
    first = least // block
    for full in range(first + _MOST_BLOCKS, first - 1, -1):
        plan = settings.page_plan(sizes.layers, max(full * block, least), block)
        if plan is None or plan.blocks >= plan.full_blocks:
            return (full + 1) * block if full < first + _MOST_BLOCKS else None
    return least


def _in_pieces(
    settings: CompressionConfig, sizes: Sizes, load: Load, blocks: int | None
) -> InPieces | None:
    pieces = pieces_of(settings, sizes.layers, sizes.block_size, load.prompt, load.spans)
    if pieces is None or not settings.enabled:
        return None
    if pieces.protects_too_much:
        raise ConfigError(
            f"--protected {load.protected} is more than a prompt in pieces holds between them; give"
            " a longer --kv-max-whole, or protect less"
        )
    held, roomy = pieces.held_pages * sizes.block_size / sizes.layers, pieces.roomy
    helps = roomy < load.prompt and (blocks is None or -(-roomy // sizes.block_size) < blocks)
    return InPieces(held_tokens=held, roomy=roomy if helps else None)


def _plan(
    settings: CompressionConfig, sizes: Sizes, load: Load
) -> tuple[PagePlan | None, str | None]:
    """How much of the prompt is kept, or why it is left whole."""
    if not settings.enabled:
        return None, "only requests that ask for it are compressed"
    plan = settings.page_plan(sizes.layers, load.prompt, sizes.block_size, load.spans)
    pieces = pieces_of(settings, sizes.layers, sizes.block_size, load.prompt, load.spans)
    whole = _left_whole(settings, load, plan) if pieces is None else None
    if whole is None and plan is not None and settings.resolved_lookahead:
        ahead = _lookahead(settings, sizes, load)
        plan = ahead.kept(
            KVFootprint(num_layers=sizes.layers, block_size=sizes.block_size), ahead.due
        )
    return (plan, None) if whole is None else (None, whole)


def _lookahead(settings: CompressionConfig, sizes: Sizes, load: Load) -> LookAhead:
    return LookAhead(
        settings=settings,
        num_layers=sizes.layers,
        block_size=sizes.block_size,
        prompt=load.prompt,
        last=load.prompt + load.output,
        prefilled=load.prompt,
        spans=load.spans,
    )


def _kept_tokens(load: Load, plan: PagePlan | None) -> float:
    """Tokens of the prompt that a layer keeps, without those of the answer beside them."""
    if plan is None:
        return load.prompt
    return plan.pages * plan.block_size / plan.num_layers + plan.tail - (plan.tokens - load.prompt)


def _most_demanding(settings: CompressionConfig, sizes: Sizes, load: Load) -> tuple[str, Blocks]:
    """The request that takes the most of those that may be asked for: what it asks, its blocks."""
    methods = {settings.compress, *settings.allow_override}
    if settings.allow_override:
        methods |= {alias.method for alias in settings.alias}
    candidates: list[tuple[str, CompressionConfig | None]] = [("off", None)] * ("off" in methods)
    candidates += [(f"the name {alias.name}", settings.granted(alias)) for alias in settings.alias]
    for method in sorted(methods - {"off"}):
        budgets = largest_budgets(settings, method)
        for budget in (*budgets.named, *budgets.granted):
            # a bound under a method's window is nothing that a request may ask of it
            with suppress(ConfigError):
                candidates.append((f"{method} at {budget}", settings.variant(method, budget)))
    requests = [
        (asks, _blocks(load, sizes, own, _plan(own, sizes, load)[0] if own else None))
        for asks, own in candidates
    ]
    return max(requests, key=lambda request: request[1].end)


def _left_whole(settings: CompressionConfig, load: Load, plan: PagePlan | None) -> str | None:
    if load.prompt < settings.min_prompt:
        return f"shorter than --kv-min-prompt {settings.min_prompt}"
    if load.output < settings.min_output:
        return f"its answer is shorter than --kv-min-output {settings.min_output}"
    if load.output < settings.resolved_lookahead + 2:
        return f"its answer ends with the look-ahead of {settings.resolved_lookahead} tokens"
    if mostly_protected(load.spans, load.prompt):
        return "more than half of it is protected"
    if plan is None:
        return "the budget keeps all of its full blocks"
    return None


def _blocks(
    load: Load, sizes: Sizes, settings: CompressionConfig | None, plan: PagePlan | None
) -> Blocks:
    """Of a request that comes by `settings`, None for off, and keeps `plan` of its prompt."""
    block = sizes.block_size
    dropped = 0 if plan is None else plan.full_blocks - plan.blocks
    prefill, end = -(-load.prompt // block), -(-load.cached // block) - dropped
    packed_at = load.prompt if plan is None else plan.tokens
    looking = decoding = -(-packed_at // block) - dropped
    pieces, ending = None, prefill
    if settings is not None and settings.enabled:
        pieces = pieces_of(settings, sizes.layers, block, load.prompt, load.spans)
    if pieces is not None:
        prefill, ending = pieces.most_blocks, pieces.ending
    if settings is not None and packed_at > load.prompt:
        looking = _lookahead(settings, sizes, load).held_blocks(ending)
        prefill = max(prefill, looking)
    ahead = packed_at - load.prompt
    if settings is not None and settings.enabled and settings.decode_budget is not None:
        footprint = KVFootprint(num_layers=sizes.layers, block_size=block)
        if plan is not None:
            footprint.pack(plan, plan.full_blocks)
        last = load.prompt + load.output
        answer = EveryInterval(
            settings=settings, prefilled=load.prompt, last=last, spans=load.spans
        )
        packed = 0 if plan is None else plan.blocks
        end = answer.most_blocks(footprint, packed=packed, tokens=load.cached)
    return Blocks(
        prefill=prefill + sizes.other_blocks(load.prompt, sizes.in_flight),
        looking=looking + sizes.other_blocks(load.prompt),
        decoding=decoding + sizes.other_blocks(load.prompt),
        end=end + sizes.other_blocks(load.cached),
        mean=(ahead * looking + (load.output - ahead) * (decoding + end) / 2) / load.output
        + sizes.other_blocks(load.cached),
    )


def _fit(
    pool_bytes: int, sizes: Sizes, request: Blocks, *, none_may_fit: bool = False
) -> Concurrency:
    # One block of the pool is the null block, which no request gets.
    blocks = max(pool_bytes // sizes.block_bytes - 1, 0)
    max_requests = sizes.max_requests
    if blocks < request.prefill and none_may_fit:
        max_requests = 0
    elif blocks < request.prefill:
        need = (request.prefill + 1) * sizes.block_bytes / 2**30
        raise ConfigError(
            "a prompt must fit once, during its prefill: this one needs"
            f" {request.prefill} blocks and the pool has {blocks}; give at least {need:.2f} GiB"
            f" beside what compression takes, a shorter --len, or pieces with --kv-max-whole"
        )
    return Concurrency(
        pool_bytes=pool_bytes,
        blocks=blocks,
        decoding=min(blocks // request.end, max_requests),
        beside_prefill=min(1 + (blocks - request.prefill) // request.end, max_requests),
        most=sizes.max_requests,
    )
