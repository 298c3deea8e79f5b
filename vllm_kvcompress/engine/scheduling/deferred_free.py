"""Where blocks go that the step that is being scheduled still reads.

Steps run in order, so whoever is given such a block in a later one writes it when it was read. Not
so a KV connector, which writes while steps run. Where steps overlap, vLLM therefore holds what is
freed until the outputs of the last step that was scheduled are there, and so are our blocks held.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock


class DeferredFree:
    """Frees blocks of one scheduler's pool, by vLLM's own rule.

    Args:
        pool: vLLM's blocks.
        scheduler: vLLM's; None where no scheduler of ours is there.
    """

    def __init__(self, pool: BlockPool, scheduler: Any = None) -> None:
        self._pool, self._scheduler = pool, scheduler

    @property
    def holds(self) -> bool:
        """Whether steps overlap and a connector may write at any time."""
        return self._scheduler is not None and bool(self._scheduler.defer_block_free)

    def free(self, blocks: list[KVCacheBlock]) -> int:
        """Free blocks once the step that is being scheduled is over, if they are to be held so.

        Returns:
            How many of them go back to the pool by that: others may still read some.
        """
        if not self.holds:
            before = self._pool.get_num_free_blocks()
            self._pool.free_blocks(blocks)
            return int(self._pool.get_num_free_blocks() - before)
        released = self._released()
        returned = sum(int(block.ref_cnt) == released[block.block_id] + 1 for block in blocks)
        scheduler = self._scheduler
        # it frees any blocks behind a step, though vLLM names it for what it frees there itself
        scheduler._free_cow_retained_blocks(blocks, scheduler.sched_step_seq)
        return returned

    def held(self) -> int:
        """Blocks that go back to the pool when the steps under way are over."""
        if not self.holds:
            return 0
        released = self._released()
        waiting = {block.block_id: block for block in self._waiting()}
        return sum(int(block.ref_cnt) == released[at] for at, block in waiting.items())

    def _waiting(self) -> Iterator[KVCacheBlock]:
        for _, blocks in self._scheduler.deferred_frees:
            yield from blocks

    def _released(self) -> Counter[int]:
        """By block id, how many of those who read it have released it."""
        return Counter(block.block_id for block in self._waiting())
