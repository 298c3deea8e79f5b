"""Memory of compression, from plain numbers: besides the KV cache, and of a prompt in prefill."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvcompress_kernels.packed_attention.scratch import triton_numbers
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan, page_plan, pages_kept
from vllm_kvcompress.methods.spans import MAX_SPANS
from vllm_kvcompress.planning.layer_groups import LayerGroups
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.schedules.pieces import piece_schedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import Kept, largest_budgets
from vllm_kvcompress.settings.packed_dtype import AUTO

_INT = _FLOAT = 4
_ALIGNMENT = 16
"""Rows of int32 are padded to a multiple of this, so that each layer's row starts at a multiple of
64 bytes."""
_MAX_PREFILLS = 16
"""Prompts assumed to keep window queries at once. More of them use memory meant for activations."""
MAX_SCORED_PROMPTS = 4
"""Prompts whose layers are scored by one launch. Their window queries are gathered for it."""
_MAX_SUMMED_REQUESTS = 4
"""Requests whose new queries are gathered together to sum their attention."""
_LOOKAHEAD_BYTES = 2**30
"""Bytes for the last queries of requests in a look-ahead, unless `lookahead_slots` is set."""
_MIN_SCORED_TOKENS = 10 * 2**15
"""Tokens, summed over layers, that one launch may always score: 32 layers of 10,240 tokens."""
HOST_SLOT_BLOCKS = 4
"""KV blocks that one slot of host memory holds of a preempted request."""
SCRATCH_ROWS = 8
"""Rows of a batch that may read scratch pages at once."""
_STAGING_DIVISOR = 8
"""Packing requests again takes a staging buffer of the longest prompt's pages divided by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that determine one rank's memory.

    Args:
        layers: compressed layers, L.
        heads, kv_heads: query and KV heads on this rank.
        head_dim: dimension of each head.
        itemsize: bytes per element of the model's dtype, which queries have too.
        longest: tokens of the longest sequence.
        block_size: tokens in a block.
        max_requests: requests that may be compressed at the same time.
        max_graph_rows: rows of the largest CUDA graph; 0 without graphs.
        cache_itemsize: bytes per element of a cached key; None for `itemsize`.
        groups: all layers of the model; None if all are compressed.
        in_flight: tokens of all requests that one step computes.
        max_drafts: maximum draft tokens that the steps in flight compute, which may be rejected.
        draft_layers: layers of a draft model, D, which keep every token in the same blocks.
        draft_model_slots: slots that a draft model writes behind the tokens of a step.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    longest: int
    block_size: int
    max_requests: int
    max_graph_rows: int = 0
    cache_itemsize: int | None = None
    groups: LayerGroups | None = None
    in_flight: int = 1
    max_drafts: int = 0
    draft_layers: int = 0
    draft_model_slots: int = 0

    @property
    def draft_slots(self) -> int:
        """Return the slots that drafts may take behind the tokens of a request."""
        return self.max_drafts + self.draft_model_slots

    @property
    def key_itemsize(self) -> int:
        """Return the bytes per element of a cached key."""
        return self.itemsize if self.cache_itemsize is None else self.cache_itemsize

    @property
    def rows(self) -> int:
        """Return the rows of the largest batch, including the padding of a CUDA graph."""
        return _aligned(max(self.max_requests, self.max_graph_rows))

    @property
    def blocks(self) -> int:
        """Return the columns of the block table of the longest sequence."""
        return _aligned(-(-self.longest // self.block_size))

    def other_blocks(self, tokens: int, in_flight: int = 1) -> int:
        """Return the maximum blocks of a request of `tokens` in layers that are not compressed."""
        if self.groups is None:
            return 0
        return self.groups.other_blocks(tokens, in_flight, self.block_size)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block: keys and values of its tokens in all layers of a group."""
        page = 2 * self.kv_heads * self.head_dim * self.key_itemsize * self.block_size
        layers = self.layers if self.groups is None else self.groups.size
        return (layers + self.draft_layers) * page


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def layers_per_batch(longest: int, tokens: int) -> int:
    """Return how many layers of a prompt of `tokens` tokens are merged together.

    Their merged tokens take no more memory than those of one layer of the longest prompt, which
    `extra_bytes` reserves.
    """
    return max(longest // tokens, 1)


def scored_tokens(layers: int, longest: int) -> int:
    """Return the maximum tokens, summed over layers, that one launch of a kernel scores.

    Args:
        layers: layers of a prompt.
        longest: tokens of the longest sequence.
    """
    return min(max(longest, _MIN_SCORED_TOKENS), layers * longest)


def requests_per_pack(plan: PagePlan, longest: int, *, staged: bool) -> int:
    """Return how many requests with plan `plan` are packed together.

    Their scores take no more memory than those of one longest prompt. A staging buffer for kept
    pages holds an eighth of that prompt's pages, but at least one request's.

    Args:
        plan: plan of the requests.
        longest: tokens of the longest sequence.
        staged: whether any of the requests is packed in place.
    """
    count = longest // plan.tokens
    if staged:
        staging_pages = plan.num_layers * longest // (_STAGING_DIVISOR * plan.block_size)
        count = min(count, staging_pages // max(plan.pages + plan.draft_pages, 1))
    return max(count, 1)


def requests_per_sum(max_tokens: int, longest: int) -> int:
    """Return how many requests have their new attention summed together.

    Their queries are gathered, so the number is limited. Other memory is limited as in
    `requests_per_pack`.

    Args:
        max_tokens: tokens that the longest request holds.
        longest: tokens of the longest sequence.
    """
    return max(min(longest // max_tokens, _MAX_SUMMED_REQUESTS), 1)


def table_columns(sizes: Sizes, settings: CompressionConfig, blocks: int | None) -> int:
    """Return the columns of every layer's page table: the blocks of the longest sequence, or fewer.

    With `max_whole` a sequence may be longer than the pool, and no request holds more than all
    `blocks`. A layer's table lists the layer's own packed pages, not the blocks that hold all
    layers' pages. Their numbers are equal if all layers get equal shares. Otherwise, one layer may
    have more pages than its share. A budget in tokens limits them; a budget given as a ratio rarely
    does.

    Args:
        blocks: maximum blocks of the pool; None if it is not known.
    """
    if blocks is None or settings.pieces.max_whole is None:
        return sizes.blocks
    uneven_pages = max(_uneven_pages(sizes, settings, variant) for variant in settings.variants)
    return min(sizes.blocks, _aligned(blocks + uneven_pages))


def _uneven_pages(sizes: Sizes, settings: CompressionConfig, variant: CompressionConfig) -> int:
    """Return the packed pages that one layer may have in addition to the blocks of all layers."""
    if variant.method.allocator.equal_shares:
        return 0
    # A shorter prompt has a shorter tail, which may leave each layer one more page.
    pages = _max_pages(sizes, settings, variant) + sizes.layers
    if settings.decode.budget is not None:
        output_tokens = max(settings.decode.budget, variant.resolved_decode_window)
        pages = max(pages, sizes.layers * -(-output_tokens // sizes.block_size))
    return pages - -(-pages // sizes.layers)


def table_bytes(sizes: Sizes, settings: CompressionConfig, blocks: int | None = None) -> int:
    """Return the bytes of the ``[L, columns]`` int32 tables, per request slot and per batch row."""
    slots, columns = _slots(sizes, settings), table_columns(sizes, settings, blocks)
    # The page of an ordinary block before packed pages takes a column of its own.
    leading = slots * int(settings.packs_k4v3)
    tables = (slots + sizes.rows) * columns
    return (tables * (sizes.layers + sizes.draft_layers) + leading * sizes.layers) * _INT


def group_bytes(sizes: Sizes, settings: CompressionConfig) -> int:
    """Return the bytes for attention over packed groups on a GPU.

    They are its scratch memory, the tokens in groups per request slot and layer, and the lengths
    that vLLM reads per batch row and layer.
    """
    if not settings.packs_k4v3:
        return 0
    scratch = triton_numbers(sizes.head_dim) * _FLOAT
    return scratch + (_slots(sizes, settings) + sizes.rows) * sizes.layers * _INT


def _slots(sizes: Sizes, settings: CompressionConfig) -> int:
    """Return the page pool's slots: one per request, slot 0, and those of scratch pages."""
    return sizes.max_requests + 1 + (SCRATCH_ROWS if scratch_blocks(sizes, settings) else 0)


def scratch_blocks(sizes: Sizes, settings: CompressionConfig) -> int:
    """Return the blocks for dequantised copies of packed pages, which vLLM's scheduler never uses.

    All layers share them, so they hold one layer's tokens of the longest sequence. 0 if no prefill
    runs behind packed pages in k4v3.
    """
    in_pieces = settings.pieces.max_whole is not None
    if not any(
        variant.reuses_pages or (in_pieces and variant.keeps_all_tokens)
        for variant in settings.variants
    ):
        return 0
    # A block has a page in each layer.
    return -(-sizes.longest // (sizes.block_size * sizes.layers))


def host_slots(park: float | None, block_bytes: int) -> int:
    """Return the slots of host memory for preempted requests, at most `park` GiB together.

    Raises:
        ConfigError: not even one slot fits.
    """
    if park is None:
        return 0
    slot_bytes = HOST_SLOT_BLOCKS * block_bytes
    slots = int(park * 2**30 // slot_bytes)
    if not slots:
        raise ConfigError(
            f"park must be at least one slot of {HOST_SLOT_BLOCKS} KV blocks, here"
            f" {slot_bytes / 2**30:.6f} GiB, got {park}; raise --kv-park, or remove it"
        )
    return slots


def extra_bytes(sizes: Sizes, settings: CompressionConfig, blocks: int | None = None) -> int:
    """Return the maximum bytes on one rank for page tables and for compressing one longest prompt.

    Prompts are packed one after another, so one prompt of the longest length counts:

    * float32 scores ``[L, Hkv, S]``, once per layer and once stacked, and int32 positions of the
      same size
    * attention statistics of the layers that one launch scores: four ``[Hq, scored_tokens]``
      tensors, a fifth if the method reads a maximum, and two more if it reads a separate prompt
      maximum
    * column sums ``[L, Hq, S]`` if the method reads them
    * the staging buffer of a prompt that is packed in place: one KV head's kept pages; with
      merging, all heads' pages and one layer's merged tokens
    * window queries ``[L, w, Hq, D]`` of several prompts, and a copy of those that one launch reads
    * if outputs are bounded, the ring of their last queries
    * if kept tokens are packed in k4v3, the memory of attention over them (`group_bytes`), and the
      scratch pages of prefills behind them

    If requests may choose their method, it is the maximum over the methods at the largest budget
    that they may ask for.

    Args:
        blocks: maximum blocks of the pool; None if it is not known.
    """
    layers, dim = sizes.layers, sizes.head_dim
    # No layer holds more tokens than its table has columns for.
    columns = table_columns(sizes, settings, blocks)
    longest = min(sizes.longest, columns * sizes.block_size)
    scores = layers * sizes.kv_heads * longest * (2 * _FLOAT + _INT)
    variants = settings.variants
    variant_reads = [
        variant.method.reads | variant.method.after_lookahead.reads for variant in variants
    ]
    maximum = any(Reads.MAXIMUM in reads for reads in variant_reads)
    # Copies of two statistics without the columns of the window.
    prompt_maximum = 2 * any(Reads.PROMPT_MAXIMUM in reads for reads in variant_reads)
    columns = scored_tokens(layers, longest)
    statistics = (4 + maximum + prompt_maximum) * sizes.heads * columns * _FLOAT
    window = max(
        variant.method.lookahead_window + variant.method.probe_tokens for variant in variants
    )
    queries = (
        (_MAX_PREFILLS + MAX_SCORED_PROMPTS) * layers * window * sizes.heads * dim * sizes.itemsize
    )
    sums = layers * sizes.heads * longest * _FLOAT
    if not any(Reads.COLUMN_SUMS in reads for reads in variant_reads):
        sums = 0
    staging = _staging_bytes(sizes, settings, longest, blocks)
    prompt_bytes = scores + statistics + queries + sums + staging
    if variants[0].method.compresses_repeatedly:
        # the slots of protected spans in packed pages
        prompt_bytes += sizes.max_requests * layers * sizes.kv_heads * MAX_SPANS * _INT
    prompt_bytes += group_bytes(sizes, settings)
    prompt_bytes += scratch_blocks(sizes, settings) * sizes.block_bytes
    if settings.park is not None:
        prompt_bytes += HOST_SLOT_BLOCKS * sizes.block_bytes  # the staging buffer of `HostPages`
    return table_bytes(sizes, settings, blocks) + prompt_bytes + ring_bytes(sizes, settings)


def ring_bytes(sizes: Sizes, settings: CompressionConfig) -> int:
    """Return the bytes of the last queries ``[L, w, Hq, D]`` of all requests that have a slot.

    This includes the queries gathered to sum an interval's attention. Packing outputs needs no
    more memory than packing one longest prompt, except for the buffer in `extra_bytes`: no more
    requests are packed together than fit (`requests_per_pack`).
    """
    gathered = (
        _MAX_SUMMED_REQUESTS
        if any(variant.method.sums_output_attention for variant in settings.variants)
        else 0
    )
    slots = ring_slots(sizes, settings)
    return (slots + 1 + gathered) * _slot_bytes(sizes, settings) if slots else 0


def ring_slots(sizes: Sizes, settings: CompressionConfig) -> int:
    """Return the number of requests whose last queries are kept at the same time; 0 if none are.

    If outputs are bounded, all running requests count. A look-ahead is a short part of an output,
    so fewer requests are in it at the same time: `lookahead_slots`, or what 1 GiB holds.
    """
    slot_bytes = _slot_bytes(sizes, settings)
    if not slot_bytes:
        return 0
    if settings.decode.budget is not None:
        return sizes.max_requests
    slots = settings.lookahead.slots or max(_LOOKAHEAD_BYTES // slot_bytes, 1)
    return min(slots, sizes.max_requests)


def _slot_bytes(sizes: Sizes, settings: CompressionConfig) -> int:
    """Return the bytes of one request's last queries."""
    query_bytes = sizes.layers * sizes.heads * sizes.head_dim * sizes.itemsize
    return ring_places(sizes, settings) * query_bytes


def ring_places(sizes: Sizes, settings: CompressionConfig) -> int:
    """Return how many queries a request keeps per layer: drafts must not overwrite the last w."""
    window = settings.ring_window
    return window and window + sizes.max_drafts


def sum_bytes_per_block(sizes: Sizes, settings: CompressionConfig) -> int:
    """Return the bytes per block for attention sums (`AttentionSums`).

    A block has a float32 per KV head and token, and a location. 0 unless a method that ranks by the
    attention of all queries packs more than once.
    """
    if not any(variant.method.sums_attention for variant in settings.variants):
        return 0
    return sizes.layers * sizes.kv_heads * (sizes.block_size * _FLOAT + _INT)


def reserved_bytes(sizes: Sizes, settings: CompressionConfig, available: int) -> int:
    """Return how many of the `available` bytes are withheld from the KV cache.

    These are `extra_bytes` and the attention sums' share.
    """
    blocks = available // sizes.block_bytes or None
    extra, sum_bytes = extra_bytes(sizes, settings, blocks), sum_bytes_per_block(sizes, settings)
    left = max(available - extra, 0)
    return extra + -(-left * sum_bytes // (sizes.block_bytes + sum_bytes))


def _staging_bytes(
    sizes: Sizes, settings: CompressionConfig, longest: int, blocks: int | None
) -> int:
    """Return the bytes of the staging buffer for pages to be moved.

    If the pool's size is known, a prompt's pages are at most those of the whole pool.
    """
    block = sizes.block_size
    head_page = block * 2 * sizes.head_dim * sizes.key_itemsize
    # float32 keys and values of one layer, once plain and once as pages
    merged = 2 * sizes.kv_heads * longest * 2 * sizes.head_dim * _FLOAT
    largest = 0
    for variant in settings.variants:
        pages = _max_pages(sizes, settings, variant)
        pages = min(pages, sizes.layers * (blocks or pages))
        staging = (pages + sizes.draft_layers * (longest // block)) * head_page
        largest = max(
            largest, staging * sizes.kv_heads + merged if variant.parts.merge else staging
        )
    if settings.decode.budget is not None:
        request_pages = sizes.layers * max(-(-settings.decode.budget // block), 1)
        if settings.protection.words:
            # A prompt that stays uncompressed because most of it is protected keeps all of it.
            request_pages = max(request_pages, sizes.layers * (longest // block))
        batch_pages = sizes.layers * longest // (_STAGING_DIVISOR * block)
        staging = max(request_pages, batch_pages) * head_page
        if any(variant.method.merges_repeatedly for variant in settings.variants):
            staging = staging * sizes.kv_heads + merged
        largest = max(largest, staging)
    return largest


def _max_pages(sizes: Sizes, settings: CompressionConfig, variant: CompressionConfig) -> int:
    """Return the most pages that the longest prompt keeps, at any budget that requests may ask for.

    For a prompt in pieces, the pages held at a boundary count if they are more. In k4v3, only the
    pages that one packing writes count.
    """

    def pages(kept_tokens: Kept, uncompressed_pages: int) -> int:
        budget, packed_dtype = kept_tokens
        try:
            chosen = settings.variant(variant.compress, budget, packed_dtype)
        except ConfigError:
            # A request with this budget is refused.
            return 0
        spec = chosen.budget_spec(sizes.layers, sizes.longest)
        page_tokens = packed_page_tokens(chosen, sizes.block_size, sizes.key_itemsize)
        if piecewise and page_tokens is not None:
            # One packing writes a prompt of up to `max_whole` tokens, or a piece and what the last
            # packing left.
            added = max(chosen.pieces.max_whole or 0, chosen.pieces.length + page_tokens)
            return min(sizes.layers * -(-added // page_tokens), all_pages)
        plan = page_plan(spec, sizes.block_size, page_tokens=page_tokens, recent_tokens=0)
        if plan is None:
            return uncompressed_pages
        # A boundary before the end has no tail, so all kept tokens are in pages.
        kept = pages_kept(spec, 0, sizes.block_size) if piecewise else plan.pages
        if not piecewise:
            window = variant.method.lookahead_window
            # Protected spans in the prompt's window raise no budget, but lie in pages of their own
            # once output tokens make up the window.
            kept += sizes.layers * (-(-window // sizes.block_size) + 1)
            if settings.protection.words:
                # Protected spans raise a budget to at most half of the prompt plus half of itself.
                size, half = plan.page_tokens, -(-min(spec.budget, sizes.longest) // 2)
                raised = sizes.longest // 2 + max(window + size, half)
                kept = max(kept, sizes.layers * (raised // size + 2))
        return min(kept + lookahead_pages, all_pages)

    piecewise = settings.pieces.max_whole is not None and sizes.longest > settings.pieces.max_whole
    # The output tokens of a look-ahead are packed with the prompt.
    lookahead_pages = sizes.layers * -(-variant.resolved_lookahead // sizes.block_size)
    budgets = largest_budgets(settings, variant.compress)
    all_pages = sizes.layers * (sizes.longest // sizes.block_size)
    page_counts = [pages(kept_tokens, 0) for kept_tokens in budgets.granted]
    # If a budget keeps everything, a slightly smaller budget compresses.
    page_counts += [pages(kept_tokens, all_pages) for kept_tokens in budgets.named]
    has_auto = variant.resolved_packed_dtype == AUTO or bool(settings.allow_override)
    if settings.pieces.max_whole is not None and piecewise and has_auto:
        # Assume no probe, which leaves the most pages.
        held = (settings.pieces.max_whole - settings.pieces.length) // sizes.block_size
        page_counts.append(sizes.layers * held)
    return max(page_counts, default=0)


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
