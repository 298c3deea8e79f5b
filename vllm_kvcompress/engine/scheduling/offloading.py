"""VllmHook `offloading`: adapts vLLM's two connectors that keep prompts in host memory.

Only vLLM imports this module, and only if one of them is configured: other versions of vLLM may
lack the names below.

Both store blocks under the hash of their tokens. `OffloadingConnector` plans a store in one step,
and its workers copy the blocks during later steps. vLLM alone keeps a running request's blocks, so
it finishes pending stores only before blocks of ended or preempted requests are written again.
Packing frees blocks of running requests, and writes to others. So there are three rules:

* A freed block is fenced: if it is allocated again, the workers finish its stores before that step.
* Before packing, the workers finish the stores that read a destination block.
* After a request is packed, its blocks are not stored, because they hold other tokens. If it is
  preempted, its prompt may be stored again.

`SimpleCPUOffloadConnector` in lazy mode needs none of them. It stores only free blocks of the
prefix cache, and takes references until they are copied. Packing writes only to blocks without
another reference, and takes them out of the prefix cache. So this connector has two other rules:

* It takes its references after look-aheads have taken their blocks (`StepBuilder.pack_early`).
* Its loads wait for the GPU to finish packing.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    offloading_connector,
    simple_cpu_offload_connector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.v1.request import Request

from vllm_kvcompress.errors import VllmHookError


def _check_attributes(side: Any, *names: str) -> None:
    """Raise VllmHookError unless a part of vLLM's connector has the attributes `names`."""
    if missing := [name for name in names if not hasattr(side, name)]:
        raise VllmHookError(
            f"vLLM's {type(side).__name__} has no attributes {missing}",
            "install a vLLM that was tested with offloading, or remove --kv-offloading-size",
        )


class _LimitedLoads:
    """Mixin that limits loads to the tokens that need not be computed here."""

    _longest_hit: Callable[[Request], int]

    def bind(self, longest_hit: Callable[[Request], int]) -> None:
        """Connect the scheduler's connector to its scheduler.

        Args:
            longest_hit: returns how many tokens of a waiting prompt need not be computed here.
        """
        self._longest_hit = longest_hit

    def _load_limit(
        self, request: Request, num_computed_tokens: int, block_size: int
    ) -> int | None:
        """Return how many tokens a load may add; None for no limit.

        Tokens whose queries the method reads are computed here, so they are not loaded.
        """
        longest_hit = self._longest_hit(request)
        if longest_hit >= int(request.num_tokens) - 1:
            return None
        return max(longest_hit - longest_hit % block_size - num_computed_tokens, 0)


class OffloadingConnector(_LimitedLoads, offloading_connector.OffloadingConnector):
    """vLLM's connector beside compression. vLLM creates one in the scheduler and in each worker."""

    def bind(self, longest_hit: Callable[[Request], int]) -> None:
        """Connect the scheduler's connector to its scheduler.

        Raises:
            VllmHookError: vLLM's connector has no such attributes.
        """
        _check_attributes(self.scheduler, "_block_id_to_pending_jobs", "_jobs", "_req_status")
        # request id -> its own limit of stored tokens, while its stores are suspended
        self._store_limits: dict[str, int | None] = {}
        super().bind(longest_hit)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens of a waiting prompt can be loaded, as vLLM does.

        A waiting request has no packed tokens, so its own limit of stored tokens applies again.
        """
        request_id = request.request_id
        if request_id in self._store_limits:
            status = self.scheduler._req_status[request_id]
            status.max_offload_tokens = self._store_limits.pop(request_id)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> Any:
        """Forget a request, and return what vLLM does."""
        self._store_limits.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)

    def _max_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        block_size = int(self.scheduler.config.kv_group_configs[0].tokens_per_block)
        return self._load_limit(request, num_computed_tokens, block_size)

    def plan_packing(self, request_id: str, freed: set[int], destinations: set[int]) -> set[int]:
        """Protect the pending stores from a packing in the step that is being scheduled.

        Args:
            request_id: the request.
            freed: ids of the blocks that the request gives up.
            destinations: ids of the blocks that hold its packed pages.

        Returns:
            Ids of the stores that the workers must finish before they pack.
        """
        scheduler: Any = self.scheduler
        # Later blocks are computed from the kept tokens, so none of them may be stored.
        if (state := scheduler._req_status.get(request_id)) is not None:
            self._store_limits.setdefault(request_id, state.max_offload_tokens)
            state.max_offload_tokens = 0
        read_destinations, changed = set(), freed | destinations
        for job_id, job in scheduler._jobs.items():
            unfenced = job.deferred_fence_block_ids or ()
            fenced = job.fenced_block_ids or ()
            if changed.isdisjoint(unfenced) and changed.isdisjoint(fenced):
                continue
            unfenced, fenced = set(unfenced), set(fenced)
            if destinations & (unfenced | fenced):
                read_destinations.add(job_id)
            if newly_fenced := unfenced & freed:
                job.deferred_fence_block_ids = [*(unfenced - freed)]
                job.fenced_block_ids = [*(fenced | newly_fenced)]
                for block_id in newly_fenced:
                    scheduler._block_id_to_pending_jobs.setdefault(block_id, set()).add(job_id)
        return read_destinations

    def finish_stores(self, job_ids: Collection[int]) -> None:
        """Wait in a worker until the stores `job_ids` have copied their blocks."""
        self.handle_preemptions(
            OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=set(job_ids))
        )


class SimpleCPUOffloadConnector(
    _LimitedLoads, simple_cpu_offload_connector.SimpleCPUOffloadConnector
):
    """vLLM's connector in lazy mode beside compression, in the scheduler and in each worker."""

    def bind(self, longest_hit: Callable[[Request], int]) -> None:
        """Connect the scheduler's connector to its scheduler.

        Raises:
            VllmHookError: vLLM's connector has no such attribute.
        """
        _check_attributes(self.scheduler_manager, "block_size")
        super().bind(longest_hit)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Connect a worker's connector to its KV cache, ``[blocks, ...]`` for each layer.

        Raises:
            VllmHookError: vLLM's worker has no such attributes.
        """
        _check_attributes(self.worker_handler, "load_stream", "_connector_metadata")
        super().register_kv_caches(kv_caches)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens to load for a waiting prompt, and whether loads take steps."""
        block_size = int(self.scheduler_manager.block_size)
        limit = self._load_limit(request, num_computed_tokens, block_size)
        if limit == 0:
            # Release the blocks in host memory that an earlier call reserved for this prompt.
            super().request_finished(request, [])
            return 0, False
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (tokens if limit is None or tokens is None else min(tokens, limit)), is_async

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Start loads that wait for the GPU to finish earlier work, as `OffloadingConnector`'s do.

        Packing starts after the step's tokens are on their way to the host. So once they arrive,
        the GPU may still read freed blocks, which the next loads overwrite.
        """
        load_stream = self.worker_handler.load_stream
        metadata = self.worker_handler._connector_metadata
        if load_stream is not None and metadata is not None and metadata.load_cpu_blocks:
            load_stream.wait_stream(torch.cuda.current_stream())
        super().start_load_kv(*args, **kwargs)
