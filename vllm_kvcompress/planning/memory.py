"""Device memory that compression takes beside the KV cache: arithmetic on plain figures."""

from dataclasses import dataclass

from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan, page_plan, pages_kept
from vllm_kvcompress.methods.spans import MOST_SPANS
from vllm_kvcompress.planning.layer_groups import LayerGroups
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import (
    adds_up,
    keeps_sums,
    lookahead_window,
    merges,
    method_of,
    packs_again,
    probe_tokens,
    ring_window,
)
from vllm_kvcompress.settings.overrides import largest_budgets

_INT = _FLOAT = 4
_ALIGNED = 16
"""Rows of int32 are padded to a multiple of this: each layer's starts at 64 bytes."""
_PREFILLS = 16
"""Prompts that keep window queries at once; those beyond live off the activations."""
_ADDED = 4
"""Answers whose queries since the last time are gathered at once."""
_LOOKAHEAD_BYTES = 2**30
"""What the last queries of requests that look ahead take, unless `lookahead_slots` is set."""
_STAGED_SHARE = 8
"""Answers that are packed together wait in a buffer of one longest prompt's pages over this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the memory of one rank depends on.

    Args:
        layers: L, those that are compressed.
        heads, kv_heads: query and KV heads on this rank. `head_dim`: of each.
        itemsize: bytes of an element of what the model computes, its queries for one.
        stored: bytes of an element of a cached key; None for `itemsize`.
        longest: tokens of the longest sequence.
        block_size: tokens in a block.
        max_requests: requests that may be compressed at once.
        captured: rows of the largest CUDA graph, 0 without graphs.
        groups: all layers of the model; None where L are all.
        in_flight: tokens of all requests that are computed at once.
        drafts: tokens that a decode step computes at most beside one, and may take back.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    longest: int
    block_size: int
    max_requests: int
    captured: int = 0
    stored: int | None = None
    groups: LayerGroups | None = None
    in_flight: int = 1
    drafts: int = 0

    @property
    def cached(self) -> int:
        """Bytes of an element of a cached key."""
        return self.itemsize if self.stored is None else self.stored

    @property
    def rows(self) -> int:
        """Rows of the largest batch, those that pad a CUDA graph included."""
        return _aligned(max(self.max_requests, self.captured))

    @property
    def blocks(self) -> int:
        """AttentionStats of a block table of the longest sequence."""
        return _aligned(-(-self.longest // self.block_size))

    def other_blocks(self, tokens: int, in_flight: int = 1) -> int:
        """Blocks that the layers which are not compressed take of so long a request at most."""
        if self.groups is None:
            return 0
        return self.groups.other_blocks(tokens, in_flight, self.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of its tokens in all layers of a group."""
        page = 2 * self.kv_heads * self.head_dim * self.cached * self.block_size
        return (self.layers if self.groups is None else self.groups.size) * page


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def layers_at_once(longest: int, tokens: int) -> int:
    """Layers of a prompt of `tokens` that are scored together.

    Their maps ``[Hq, S]`` take no more than those of one layer of the longest prompt, which is what
    `extra_bytes` sets aside. Short prompts, whose kernels are done before the next one could be
    launched, share their launches.
    """
    return max(longest // tokens, 1)


def answers_at_once(plan: PagePlan, longest: int) -> int:
    """Requests of one `plan` that are packed together where they hold packed pages already.

    Their scores take no more than those of one longest prompt, and what they keep waits in a buffer
    of an eighth of its pages, or of one request's.
    """
    room = plan.num_layers * longest // (_STAGED_SHARE * plan.block_size)
    return max(min(longest // plan.tokens, room // max(plan.pages, 1)), 1)


def additions_at_once(most: int, longest: int) -> int:
    """Answers whose latest attention is added up together, the longest of `most` tokens.

    Their queries are gathered, so they are few; what else they take is as in `answers_at_once`.
    """
    return max(min(longest // most, _ADDED), 1)


def table_columns(sizes: Sizes, settings: CompressionConfig, blocks: int | None) -> int:
    """AttentionStats of every layer's table: the blocks of the longest sequence, or fewer.

    With `max_whole` a sequence may be longer than the pool, of which no request holds more than
    all `blocks`. A layer sees its own packed pages there, in place of the blocks that hold those
    of all layers: as many where layers share evenly. Elsewhere one layer may have what the others
    can spare, so that a budget in tokens bounds it, and one in shares rarely does.

    Args:
        blocks: in the pool, at most; None where that is not known.
    """
    if blocks is None or settings.max_whole is None:
        return sizes.blocks
    uneven = max(_uneven(sizes, settings, variant) for variant in settings.variants)
    return min(sizes.blocks, _aligned(blocks + uneven))


def _uneven(sizes: Sizes, settings: CompressionConfig, variant: CompressionConfig) -> int:
    """Packed pages that one layer may have beyond the blocks that hold all layers'."""
    if method_of(variant).allocator.even:
        return 0
    # a shorter prompt's tail may leave each layer one more
    pages = _most_pages(sizes, settings, variant) + sizes.layers
    if settings.decode_budget is not None:
        answer = max(settings.decode_budget, variant.resolved_decode_window)
        pages = max(pages, sizes.layers * -(-answer // sizes.block_size))
    return pages - -(-pages // sizes.layers)


def table_bytes(sizes: Sizes, settings: CompressionConfig, blocks: int | None = None) -> int:
    """Packed pages per request slot and tables per row, ``[L, columns]`` int32 each."""
    rows = sizes.max_requests + 1 + sizes.rows
    return rows * sizes.layers * table_columns(sizes, settings, blocks) * _INT


def extra_bytes(sizes: Sizes, settings: CompressionConfig, blocks: int | None = None) -> int:
    """Bytes on one rank, at most: the page pool's tables, and one longest prompt's compression.

    One prompt of the longest length, since prompts are packed one after the other: float32
    scores ``[L, Hkv, S]``, once per layer and once stacked, int32 positions of the same size, what
    one layer's attention is reduced to (four maps ``[Hq, S]``, a fifth where the method reads a
    maximum, and two more where it reads that apart), column sums ``[L, Hq, S]`` where
    the method reads them, and the staging buffer of a prompt that is packed in place (one KV
    head's kept pages; where it is merged all heads', and a layer's merged tokens). Window queries
    ``[L, w, Hq, D]`` of several prompts, and once more as the layers that are scored together
    stack them. Where answers are bounded, the ring of their last queries. Where requests may
    choose their method, the most that any of these methods takes at the largest budget that they
    may ask for.

    Args:
        blocks: in the pool, at most; None where that is not known.
    """
    layers, dim = sizes.layers, sizes.head_dim
    # no layer holds more at once
    columns = table_columns(sizes, settings, blocks)
    longest = min(sizes.longest, columns * sizes.block_size)
    scores = layers * sizes.kv_heads * longest * (2 * _FLOAT + _INT)
    variants = settings.variants
    every_read = [
        method_of(variant).reads | method_of(variant, scored_by_output=True).reads
        for variant in variants
    ]
    maximum = any(Reads.MAXIMUM in reads for reads in every_read)
    # what reaches into the window is cut off in two further maps
    apart = 2 * any(Reads.APART in reads for reads in every_read)
    maps = (4 + maximum + apart) * sizes.heads * longest * _FLOAT
    window = max(lookahead_window(variant) + probe_tokens(variant) for variant in variants)
    queries = (_PREFILLS + 1) * layers * window * sizes.heads * dim * sizes.itemsize
    sums = layers * sizes.heads * longest * _FLOAT
    if not any(Reads.COLUMN_SUMS in reads for reads in every_read):
        sums = 0
    own = scores + maps + queries + sums + _staged(sizes, settings, longest, blocks)
    if packs_again(settings):
        # where protected spans lie in what was packed
        own += sizes.max_requests * layers * sizes.kv_heads * MOST_SPANS * _INT
    return table_bytes(sizes, settings, blocks) + own + ring_bytes(sizes, settings)


def ring_bytes(sizes: Sizes, settings: CompressionConfig) -> int:
    """Bytes of the last queries ``[L, w, Hq, D]`` of as many requests as have a slot for them.

    And of those that are gathered at once, where an interval's attention is added up.
    What packing answers takes is within what one longest prompt's takes, but for the buffer that
    `extra_bytes` counts: as many are packed together as fit there (`answers_at_once`).
    """
    gathered = _ADDED if any(adds_up(variant) for variant in settings.variants) else 0
    slots = ring_slots(sizes, settings)
    return (slots + 1 + gathered) * _slot_bytes(sizes, settings) if slots else 0


def ring_slots(sizes: Sizes, settings: CompressionConfig) -> int:
    """Requests whose last queries are kept at once; 0 where none are.

    Where answers are bounded, all that run. A look-ahead is a short part of an answer, so that
    fewer are in it: as many as `lookahead_slots` says, or as 1 GiB holds.
    """
    each = _slot_bytes(sizes, settings)
    if not each:
        return 0
    if settings.decode_budget is not None:
        return sizes.max_requests
    slots = settings.lookahead_slots or max(_LOOKAHEAD_BYTES // each, 1)
    return min(slots, sizes.max_requests)


def _slot_bytes(sizes: Sizes, settings: CompressionConfig) -> int:
    """Bytes of one request's last queries."""
    row = sizes.layers * sizes.heads * sizes.head_dim * sizes.itemsize
    return ring_places(sizes, settings) * row


def ring_places(sizes: Sizes, settings: CompressionConfig) -> int:
    """Queries that are kept of each layer of a request: drafts must not write over the last w."""
    window = ring_window(settings)
    return window and window + sizes.drafts


def sums_per_block(sizes: Sizes, settings: CompressionConfig) -> int:
    """Bytes beside every block: a float32 per KV head and token, and where it is (`AttentionSums`).

    0 unless a method that ranks by the attention of all rows packs something more than once.
    """
    if not any(keeps_sums(variant) for variant in settings.variants):
        return 0
    return sizes.layers * sizes.kv_heads * (sizes.block_size * _FLOAT + _INT)


def bytes_beside(sizes: Sizes, settings: CompressionConfig, available: int) -> int:
    """How many of the `available` bytes the KV cache does not get: `extra_bytes`, and its share."""
    blocks = available // sizes.block_bytes or None
    extra, each = extra_bytes(sizes, settings, blocks), sums_per_block(sizes, settings)
    left = max(available - extra, 0)
    return extra + -(-left * each // (sizes.block_bytes + each))


def _staged(sizes: Sizes, settings: CompressionConfig, longest: int, blocks: int | None) -> int:
    """Bytes of the buffer for pages that wait to be moved.

    A prompt needs no more of it than the whole pool, where the pool's size is known.
    """
    block = sizes.block_size
    head_page = block * 2 * sizes.head_dim * sizes.cached
    # float32 keys and values of one layer, as they are and as pages
    merged = 2 * sizes.kv_heads * longest * 2 * sizes.head_dim * _FLOAT
    largest = 0
    for variant in settings.variants:
        pages = _most_pages(sizes, settings, variant)
        staged = min(pages, sizes.layers * (blocks or pages)) * head_page
        largest = max(largest, staged * sizes.kv_heads + merged if variant.parts.merge else staged)
    if settings.decode_budget is not None:
        one = sizes.layers * max(-(-settings.decode_budget // block), 1)
        if settings.protect:
            # of a prompt that is left whole, since most of it is protected, all of that stays
            one = max(one, sizes.layers * (longest // block))
        together = sizes.layers * longest // (_STAGED_SHARE * block)
        staged = max(one, together) * head_page
        if any(merges(variant) for variant in settings.variants):
            staged = staged * sizes.kv_heads + merged
        largest = max(largest, staged)
    return largest


def _protecting(sizes: Sizes, window: int, budget: int) -> int:
    """Pages that a budget is raised to at most: half of a prompt, and its share of the other."""
    beside = max(window + sizes.block_size, -(-min(budget, sizes.longest) // 2))
    return sizes.layers * ((sizes.longest // 2 + beside) // sizes.block_size + 2)


def _most_pages(sizes: Sizes, settings: CompressionConfig, variant: CompressionConfig) -> int:
    """Pages that the longest prompt keeps at most, at the largest budget a request may ask for.

    Or holds between its pieces, whatever its budget.
    """

    def pages(budget: float | int, otherwise: int) -> int:
        if isinstance(budget, int) and budget <= variant.resolved_window:
            # The method refuses a budget that its window fills.
            return 0
        prompt = variant.variant(budget=budget).prompt(sizes.layers, sizes.longest)
        plan = page_plan(prompt, sizes.block_size)
        if plan is None:
            return otherwise
        # at a boundary inside there is no tail, whose tokens the others' pages keep
        kept = pages_kept(prompt, 0, sizes.block_size) if piecewise else plan.pages
        if not piecewise:
            window = lookahead_window(variant)
            # Spans that a request protects without raising its budget may lie in its window, and
            # stand in pages of their own once its answer is the window.
            kept += sizes.layers * (-(-window // sizes.block_size) + 1)
            if settings.protect:
                kept = max(kept, _protecting(sizes, window, prompt.budget))
        return min(kept + ahead, every)

    piecewise = settings.max_whole is not None and sizes.longest > settings.max_whole
    # what an answer wrote while its prompt stood whole is packed with it
    ahead = sizes.layers * -(-variant.resolved_lookahead // sizes.block_size)
    budgets = largest_budgets(settings, variant.compress)
    every = sizes.layers * (sizes.longest // sizes.block_size)
    page_counts = [pages(budget, 0) for budget in budgets.granted]
    # where a budget keeps everything, one a little below it compresses
    page_counts += [pages(budget, every) for budget in budgets.named]
    if settings.max_whole is not None and piecewise:
        # a prompt without tokens has no probe
        held = (settings.max_whole - settings.piece) // sizes.block_size
        page_counts.append(sizes.layers * held)
    return max(page_counts, default=0)
