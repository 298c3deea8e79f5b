"""What packing a request takes of the pool, and what it changes in the scheduler."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvcompress.engine.messages.step import PackRequest
from vllm_kvcompress.planning.kv_footprint import KVFootprint


class DestinationBlocks(NamedTuple):
    """What a prompt's first packing takes of the pool beside the prompt's own blocks."""

    too_few: int
    """Blocks that the prompt's own unshared ones are too few by, so that they must be fresh."""
    others: int
    """Destination blocks that may be fresh, or the prompt's own."""


class Pending(NamedTuple):
    """A request that is packed after this step, and what that changes in the scheduler."""

    pack: PackRequest
    footprint: KVFootprint
    own: list[KVCacheBlock]
    """Its ordinary blocks that become destinations."""


def unshared(
    held: Sequence[KVCacheBlock], start: int, stop: int, count: int
) -> list[tuple[int, KVCacheBlock]]:
    """The last blocks of a request from `start` to `stop` that nobody else reads: `count` at most.

    Args:
        held: the request's.
    """
    mine = [(at, block) for at, block in enumerate(held[start:stop], start) if block.ref_cnt == 1]
    return mine[max(len(mine) - count, 0) :]
