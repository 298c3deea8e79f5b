"""Packed pages in vLLM's prefix cache: pages of ended requests that later requests read.

Packed block n holds page n of every layer, so all layers have the same tokens in it. Page 0 begins
after the request's first block, which stays an ordinary block. The key of a packed block is the
hash of the page's last ordinary block, in a cache group of its own. vLLM's hashes chain over the
whole prefix and contain salt, LoRA and images, so equal keys mean equal tokens and equal tokens
before them.

The ordinary blocks behind the last page, its tail, were computed from packed tokens. They are
cached too, in another group, because only requests that read packed pages may read them. A block
holds a fraction of a page's tokens, so tails are evicted before any page.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, get_group_id

from vllm_kvcompress.engine.scheduling.packed_events import PackedEvents
from vllm_kvcompress.engine.scheduling.request_state import RequestState

_PAGES = 0x6B763433
"""Id of the cache group of packed pages, which no model has."""
_TAILS = _PAGES + 1
"""Id of the cache group of ordinary blocks behind packed pages."""


class PackedHit(NamedTuple):
    """A cached prefix with packed pages."""

    leading: list[KVCacheBlock]
    """Ordinary blocks before the first page."""
    packed: list[KVCacheBlock]
    """Blocks with packed pages, in whole cells."""
    tail: list[KVCacheBlock]
    """Ordinary blocks behind the last page."""


class PackedPrefixes:
    """The packed pages of one scheduler's prefix cache.

    Args:
        pool: vLLM's block pool.
        group_id: vLLM's id of the cache group of the compressed layers.
        block_size: tokens in a block.
        page_tokens: tokens in a packed page.
        cell: tokens of a cell of the grid; None off the grid. Packed hits end with a cell.
        recent_tokens: minimum of a request's last tokens that are not read from packed pages.
        zero_blocks: gets the ids of blocks that the workers must fill with zeros before this step.
    """

    leading_blocks = 1
    """Ordinary blocks before the first page."""

    def __init__(
        self,
        pool: BlockPool,
        group_id: int,
        block_size: int,
        page_tokens: int,
        cell: int | None,
        recent_tokens: int,
        zero_blocks: list[int],
    ) -> None:
        self._pool, self._group_id, self._block_size = pool, group_id, block_size
        self.page_tokens, self._pages_of_cell = page_tokens, (cell or page_tokens) // page_tokens
        self._blocks_of_page, self._recent_tokens = page_tokens // block_size, recent_tokens
        # Off the grid, tokens may be computed from any mixture of packed and ordinary ones.
        self._tail_groups = (_TAILS,) if cell else (_TAILS, group_id)
        self._zero_blocks = zero_blocks
        # Blocks with groups that no request may own any more. Their bytes stay until the pool hands
        # them out, because a later request may find them. It outlives `reset_prefix_cache`.
        self._stale_ids: set[int] = set()
        # Cached tail blocks by id, the latest released ones last. Some may be in use again.
        self._tails: dict[int, KVCacheBlock] = {}
        self._events: PackedEvents | None = None
        if pool.enable_kv_cache_events:
            self._events = PackedEvents(pool, block_size, group_id, _PAGES, _TAILS)
        self._vllm_get_new_blocks = pool.get_new_blocks
        wrapped: Any = self._get_new_blocks
        pool.get_new_blocks = wrapped

    def tokens(self, pages: int) -> int:
        """Return the tokens of a prefix with so many packed pages, its ordinary block included."""
        return self.leading_blocks * self._block_size + pages * self.page_tokens

    def find(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> PackedHit | None:
        """Return the longest cached prefix with a packed page, or None if there is none.

        Args:
            block_hashes: hashes of the request's full blocks.
            max_tokens: maximum tokens of the prefix.
        """
        if not block_hashes:
            return None
        leading = self._pool.get_cached_block(block_hashes[0], [self._group_id])
        packed: list[KVCacheBlock] = []
        keys = block_hashes[self._blocks_of_page :: self._blocks_of_page] if leading else ()
        for pages, key in enumerate(keys, 1):
            blocks = self._pool.get_cached_block(key, [_PAGES])
            if not blocks or self.tokens(pages) + self._recent_tokens > max_tokens:
                break
            packed += blocks
        packed = packed[: len(packed) // self._pages_of_cell * self._pages_of_cell]
        if not packed or leading is None:
            return None
        tail: list[KVCacheBlock] = []
        first, last = self._first_block(len(packed)), max_tokens // self._block_size
        for key in block_hashes[first:last]:
            found = (self._pool.get_cached_block(key, [group]) for group in self._tail_groups)
            blocks = next(filter(None, found), None)
            if blocks is None:
                break
            tail += blocks
        return PackedHit(leading, packed, tail)

    def _first_block(self, pages: int) -> int:
        """Return the index of the first ordinary block behind so many pages."""
        return self.leading_blocks + pages * self._blocks_of_page

    def store(self, state: RequestState) -> None:
        """Enter the request's packed pages whose tokens are known by now into the prefix cache.

        With async scheduling, the scheduler learns output tokens after it has planned to pack them.
        """
        if not self._pool.enable_caching or state.left_grid:
            return
        hashes = state.request.block_hashes
        known = max(len(hashes) - self.leading_blocks, 0) // self._blocks_of_page
        first, last = state.stored_pages, min(state.num_packed_pages, known)
        if last <= first:
            return
        state.stored_pages = last
        # vLLM's pages begin with the sequence, and ours behind the leading block.
        hashes = hashes[self.leading_blocks :]
        size = self._blocks_of_page
        keys = hashes[size - 1 :: size]
        self._cache(hashes, keys, state.packed_blocks, first, last, self.page_tokens, _PAGES)
        if self._events is not None:
            pages = [hashes[page * size : (page + 1) * size] for page in range(first, last)]
            self._events.store(state.request, self._first_block(first), pages)

    def _store_tail(self, state: RequestState) -> None:
        """Enter the full ordinary blocks behind the last page of a request into the cache."""
        request, first = state.request, self._first_block(state.num_packed_pages)
        hashes = request.block_hashes
        computed = min(int(request.num_computed_tokens), int(request.num_tokens))
        last = min(len(hashes), computed // self._block_size, len(state.blocks))
        if first >= last:
            return
        self._cache(hashes, hashes, state.blocks, first, last, self._block_size, _TAILS)
        for block in reversed(state.blocks[first:last]):
            self._tails.pop(block.block_id, None)
            self._tails[block.block_id] = block
        if self._events is not None:
            self._events.store(request, first, [[key] for key in hashes[first:last]])

    def _cache(
        self,
        hashes: Sequence[BlockHash],
        keys: Sequence[BlockHash],
        blocks: list[KVCacheBlock],
        first: int,
        last: int,
        block_tokens: int,
        group_id: int,
    ) -> None:
        """Enter `blocks` from `first` up to `last` into the prefix cache, without vLLM's events.

        Skips blocks that are cached already, and blocks whose key is cached already.
        """
        entered = list(blocks)
        for index in range(first, last):
            known = self._pool.get_cached_block(keys[index], [group_id])
            if known or blocks[index].block_hash is not None:
                # vLLM skips null blocks.
                entered[index] = self._pool.null_block
        request: Any = SimpleNamespace(block_hashes=hashes)
        self._pool.enable_kv_cache_events = False
        try:
            self._pool.cache_full_blocks(request, entered, first, last, block_tokens, group_id)
        finally:
            self._pool.enable_kv_cache_events = self._events is not None

    def forget_originals(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove unshared blocks that were just packed from the prefix cache.

        If they kept their hash, the pool would evict older packed pages before them.
        """
        self._pool.evict_blocks({block.block_id for block in blocks if block.ref_cnt == 1})

    def release(self, state: RequestState) -> None:
        """Keep the pages of a request that ends or is preempted, until the pool needs them."""
        self.store(state)
        if 0 < state.num_packed_pages == state.stored_pages and not state.left_grid:
            self._store_tail(state)
        self._stale_ids.update(block.block_id for block in state.packed_blocks)

    def _get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        self._evict_tails(num_blocks)
        blocks: list[KVCacheBlock] = self._vllm_get_new_blocks(num_blocks)
        if self._stale_ids:
            stale = [block.block_id for block in blocks if block.block_id in self._stale_ids]
            self._stale_ids.difference_update(stale)
            self._zero_blocks += stale
        return blocks

    def _evict_tails(self, num_blocks: int) -> None:
        """Let the pool hand out free tail blocks, if its next blocks would include a page."""
        if not self._tails:
            return
        queue, wanted = self._pool.free_block_queue, num_blocks
        block = queue.fake_free_list_head.next_free_block
        while wanted and block is not None and not _is_in(block, _PAGES):
            block, wanted = block.next_free_block, wanted - 1
        evicted: list[KVCacheBlock] = []
        while len(evicted) < wanted and self._tails:
            block = self._tails.pop(next(iter(self._tails)))
            if block.ref_cnt == 0 and _is_in(block, _TAILS):
                evicted.append(block)
        if evicted:
            self._pool.evict_blocks({block.block_id for block in evicted})
            for block in evicted:
                queue.remove(block)
            queue.prepend_n(evicted)


def _is_in(block: KVCacheBlock, group_id: int) -> bool:
    """Return whether a block is cached in the given cache group."""
    return block.block_hash is not None and get_group_id(block.block_hash) == group_id
