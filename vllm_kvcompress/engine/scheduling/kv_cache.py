"""VllmHook `kv_cache`: the block managers of all layer groups, whose blocks come from one pool.

vLLM keeps one manager per layer group. `CompressedManager` manages the compressed layers. Layers
with a sliding window and layers that keep a state form groups of their own, which vLLM manages.

A packed request has null blocks in place of the full blocks of its prompt, the ordinary blocks
behind them, and destination blocks that are not in ``req_to_blocks``. So vLLM's arithmetic on that
list (positions, slots, blocks still needed) stays right.

Decisions that concern the model's other layer groups too go through vLLM's coordinator
(`coordination`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvcompress.engine.messages.cache_spec import CompressedSpec
from vllm_kvcompress.errors import VllmHookError


def _without_scheduler(*_: object) -> NoReturn:
    raise VllmHookError(
        "CompressedManager knows no scheduler; select the scheduler through"
        " --kv-compress, not by hand"
    )


class CompressedManager(FullAttentionManager):
    """Counts and frees the blocks of compressed requests; `step_builder` decides about them.

    Not thread-safe, like every vLLM manager. It runs in the scheduler's loop.
    """

    def __init__(self, kv_cache_spec: CompressedSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._release: Callable[[str, list[KVCacheBlock]], list[KVCacheBlock]] = _without_scheduler
        self._max_piece_blocks: Callable[[str], int | None] = _without_scheduler

    def bind(
        self,
        release: Callable[[str, list[KVCacheBlock]], list[KVCacheBlock]],
        max_piece_blocks: Callable[[str], int | None],
    ) -> None:
        """Connect the manager to its scheduler, which exists later.

        Args:
            release: `StepBuilder.release`.
            max_piece_blocks: `StepBuilder.max_piece_blocks`.
        """
        self._release, self._max_piece_blocks = release, max_piece_blocks

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """Return False: a block after a compressed prompt does not match its tokens' hash."""
        return False

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """Return the blocks to allocate, without destination blocks (`coordination` adds them)."""
        needed: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            *args,
            apply_admission_cap=apply_admission_cap,
            **kwargs,
        )
        # vLLM asks whether the prompt can ever fit. In-place packing needs no further block, and a
        # prompt in pieces never holds more than its schedule's maximum.
        max_blocks = self._max_piece_blocks(request_id) if apply_admission_cap else None
        return needed if max_blocks is None else min(needed, max_blocks)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request and return all its blocks, including the destinations."""
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return self._release(request_id, blocks)


# Managers of the uncompressed layer groups that we support.
_OTHER_MANAGERS = (SlidingWindowManager, MambaManager)


class GroupBlocks:
    """The block managers of one scheduler.

    Raises:
        VllmHookError: there is no `CompressedManager`, more than one, or a manager that is neither
            ours nor for sliding windows or states.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        coordinator: Any = cache.coordinator
        managers = coordinator.single_type_managers
        compressed = [manager for manager in managers if isinstance(manager, CompressedManager)]
        others = [manager for manager in managers if type(manager) in _OTHER_MANAGERS]
        if len(compressed) != 1 or len(compressed) + len(others) != len(managers):
            names = [type(manager).__name__ for manager in managers]
            raise VllmHookError(
                "compression needs exactly one KV cache group managed by CompressedManager, and"
                f" only sliding-window and state groups besides, got {names}"
            )
        self.compressed: CompressedManager = compressed[0]
        self.compressed_index = managers.index(compressed[0])
        self.others = others

    def other_layer_blocks(self, request_id: str) -> int:
        """Return the number of blocks that a request holds in the uncompressed layers."""
        held = (manager.req_to_blocks.get(request_id, ()) for manager in self.others)
        return sum(not block.is_null for blocks in held for block in blocks)

    def missing_blocks(self, request_id: str, num_tokens: int, num_steps: int = 1) -> int:
        """Return the maximum number of blocks that a running request still takes in all groups.

        A state is written at the end of a step, so a step takes at most one block for it, however
        many tokens it computes.

        Args:
            request_id: the running request.
            num_tokens: computed tokens to reach.
            num_steps: steps of the request until then.
        """
        missing = 0
        for manager in (self.compressed, *self.others):
            held = len(manager.req_to_blocks.get(request_id, ()))
            needed = max(-(-num_tokens // int(manager.block_size)) - held, 0)
            missing += min(needed, num_steps) if isinstance(manager, MambaManager) else needed
        return missing


# Registered on import, which the scheduler class needs. It has no effect until a worker returns
# such a spec. vLLM registers its built-in specs only in an EMPTY registry, so we make it do that
# first.
register_all_kvcache_specs(None)
KVCacheSpecRegistry.register(CompressedSpec, CompressedManager, FullAttentionSpec)
