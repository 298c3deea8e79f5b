"""KV cache events of packed pages, for routers that index the hashes of ordinary blocks.

We announce the hash of every ordinary block that a packed page covers. We report a hash as removed
once neither the page nor an ordinary block with that hash is cached.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash
from vllm.v1.request import Request


class PackedEvents:
    """Translates one pool's events.

    It looks hashes up in the cache when vLLM takes the events. So after each batch of events, a
    router's index has the hashes that a lookup finds.

    Args:
        pool: vLLM's block pool, with KV cache events.
        block_size: tokens in a block.
        group_id: vLLM's id of the cache group of ordinary blocks.
        packed_group_id: id of the cache group of packed pages.
        tail_group_id: id of the cache group of ordinary blocks behind packed pages.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        group_id: int,
        packed_group_id: int,
        tail_group_id: int,
    ) -> None:
        self._pool, self._block_size, self._group_id = pool, block_size, group_id
        self._packed_group_id, self._tail_group_id = packed_group_id, tail_group_id
        self._hashes_of_page: dict[ExternalBlockHash, list[BlockHash]] = {}
        # By the announced hash of a block: the block's own hash, and the key of its page.
        self._keys: dict[ExternalBlockHash, tuple[BlockHash, BlockHash]] = {}
        self._vllm_take_events: Callable[[], list[KVCacheEvent]] = pool.take_events
        self._vllm_reset_prefix_cache: Callable[[], bool] = pool.reset_prefix_cache
        wrapped: Any = pool
        wrapped.take_events, wrapped.reset_prefix_cache = self._take_events, self._reset

    def store(self, request: Request, first: int, pages: Sequence[list[BlockHash]]) -> None:
        """Announce the ordinary blocks that a request's newly cached pages stand for.

        Args:
            request: vLLM's request.
            first: index of the first of these blocks.
            pages: hashes of the ordinary blocks of each new page, or of one block behind the pages.
                The last is its key.
        """
        for hashes in pages:
            if len(hashes) > 1:
                self._hashes_of_page[maybe_convert_block_hash(hashes[-1])] = hashes
            for block_hash in hashes:
                external = maybe_convert_block_hash(block_hash)
                if len(hashes) > 1 or external not in self._keys:
                    self._keys[external] = (block_hash, hashes[-1])
        last = first + sum(map(len, pages))
        self._pool.emit_cached_block_events(request, last, self._block_size, self._group_id)
        # vLLM's event begins with the sequence.
        event: Any = self._pool.kv_event_queue[-1]
        event.parent_block_hash = event.block_hashes[first - 1]
        event.token_ids = event.token_ids[first * self._block_size :]
        event.block_hashes = event.block_hashes[first:]
        if event.extra_keys is not None:
            event.extra_keys = event.extra_keys[first:]

    def _reset(self) -> bool:
        is_reset = self._vllm_reset_prefix_cache()
        if is_reset:
            self._hashes_of_page.clear()
            self._keys.clear()
        return is_reset

    def _take_events(self) -> list[KVCacheEvent]:
        taken: list[KVCacheEvent] = []
        for event in self._vllm_take_events():
            if not isinstance(event, BlockRemoved):
                taken.append(event)
                continue
            removed = event.block_hashes
            if event.group_idx == self._packed_group_id:
                removed = [
                    maybe_convert_block_hash(block_hash)
                    for page in event.block_hashes
                    for block_hash in self._hashes_of_page.get(page, ())
                ]
            elif event.group_idx not in (self._group_id, self._tail_group_id):
                taken.append(event)
                continue
            if gone := [external for external in removed if not self._is_cached(external)]:
                medium = event.medium
                taken.append(
                    BlockRemoved(block_hashes=gone, medium=medium, group_idx=self._group_id)
                )
        return taken

    def _is_cached(self, external: ExternalBlockHash) -> bool:
        """Return whether a block is cached, alone or in a page; forget it if it is not."""
        keys = self._keys.get(external)
        if keys is None:
            return False
        block_hash, page = keys
        if (
            self._pool.get_cached_block(page, [self._packed_group_id])
            or self._pool.get_cached_block(block_hash, [self._group_id])
            or self._pool.get_cached_block(block_hash, [self._tail_group_id])
        ):
            return True
        del self._keys[external]
        self._hashes_of_page.pop(external, None)
        return False
