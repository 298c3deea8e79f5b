"""Blocks that packing a request takes from the pool, and the scheduler's record of a packing."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvcompress.engine.messages.step import PackRequest
from vllm_kvcompress.planning.kv_footprint import KVFootprint


class DestinationBlocks(NamedTuple):
    """Destination blocks of a prompt's first packing."""

    must_be_fresh: int
    """Destinations that must come from the pool, because the prompt has too few unshared blocks."""
    may_be_fresh: int
    """Destinations that can come from the pool or be blocks of the prompt."""


NO_DESTINATIONS = DestinationBlocks(0, 0)


class PendingPack(NamedTuple):
    """A packing planned for the step that is being scheduled."""

    pack: PackRequest
    footprint: KVFootprint
    reused_blocks: list[KVCacheBlock]
    """The request's unpacked blocks that become destinations."""


def last_unshared_blocks(
    request_blocks: Sequence[KVCacheBlock], start: int, stop: int, max_blocks: int
) -> list[tuple[int, KVCacheBlock]]:
    """Return the last unshared blocks of a request in ``[start, stop)``, each with its index.

    Args:
        request_blocks: all blocks of the request, by index.
        start: first block index.
        stop: block index behind the last one.
        max_blocks: maximum number of blocks to return.
    """
    unshared = [
        (index, block)
        for index, block in enumerate(request_blocks[start:stop], start)
        if block.ref_cnt == 1
    ]
    return unshared[max(len(unshared) - max_blocks, 0) :]
