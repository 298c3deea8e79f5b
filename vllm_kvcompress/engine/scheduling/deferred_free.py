"""Free blocks that the step being scheduled still reads, immediately or once it has run.

Steps run in order. A block that is freed now and allocated again is written in a later step, after
this step has read it, so freeing it immediately is safe. A KV connector breaks that rule, because
it writes while steps run. Where steps overlap, vLLM therefore keeps freed blocks until the outputs
of the last scheduled step arrive. We do the same with our blocks. The device may still pack then,
so connectors wait for it in the workers (`worker.pulls`, `scheduling.offloading`).
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock


class DeferredFree:
    """Frees blocks of one scheduler's pool by vLLM's rule.

    Args:
        pool: vLLM's block pool.
        scheduler: vLLM's scheduler.
    """

    def __init__(self, pool: BlockPool, scheduler: Any) -> None:
        self._pool, self._scheduler = pool, scheduler
        self.zero_blocks: list[int] = []
        """Ids of freed blocks that held groups and that the workers must fill with zeros."""
        # Those of them that are freed once they are zero.
        self._unfreed: list[KVCacheBlock] = []

    @property
    def has_connector(self) -> bool:
        """Return whether a connector writes to blocks, independent of the steps."""
        return self._scheduler.connector is not None

    @property
    def is_deferring(self) -> bool:
        """Return whether steps overlap and a connector may write at any time."""
        return bool(self._scheduler.defer_block_free)

    def free(self, blocks: list[KVCacheBlock]) -> int:
        """Free blocks, after the step being scheduled if frees are deferred.

        Returns:
            Number of blocks that go back to the pool, now or later. Blocks shared with another
            request do not.
        """
        if not self.is_deferring:
            before = self._pool.get_num_free_blocks()
            self._pool.free_blocks(blocks)
            return int(self._pool.get_num_free_blocks() - before)
        deferred_refs = self._deferred_refs()
        returned = sum(int(block.ref_cnt) == deferred_refs[block.block_id] + 1 for block in blocks)
        scheduler = self._scheduler
        # Despite its name, this vLLM method frees any blocks after the given step.
        scheduler._free_cow_retained_blocks(blocks, scheduler.sched_step_seq)
        return returned

    def deferred_blocks(self) -> int:
        """Return the number of blocks that go back to the pool when the running steps end."""
        unfreed = len(self._unfreed)
        if not self.is_deferring:
            return unfreed
        deferred_refs = self._deferred_refs()
        deferred = {block.block_id: block for block in self._deferred()}
        return unfreed + sum(
            int(block.ref_cnt) == deferred_refs[key] for key, block in deferred.items()
        )

    def zero(self, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Have the next step zero blocks that held groups; return the blocks to free now.

        As floats, the bytes of groups may be NaN, and attention multiplies masked values by 0. The
        workers zero the blocks before their next owner writes to them. A KV connector may write at
        any time, so if there is a connector, the blocks are freed only after they are zeroed.
        """
        self.zero_blocks += [block.block_id for block in blocks]
        if not self.has_connector:
            return blocks
        self._unfreed += blocks
        return []

    def take_zero_blocks(self) -> tuple[int, ...]:
        """Return `zero_blocks` for a step's plan, and free those that waited for it."""
        zero_blocks = tuple(self.zero_blocks)
        self.zero_blocks.clear()
        unfreed, self._unfreed = self._unfreed, []
        if unfreed:
            self.free(unfreed)
        return zero_blocks

    def _deferred(self) -> Iterator[KVCacheBlock]:
        for _, blocks in self._scheduler.deferred_frees:
            yield from blocks

    def _deferred_refs(self) -> Counter[int]:
        """Return the number of references to be released later, by block id."""
        return Counter(block.block_id for block in self._deferred())
