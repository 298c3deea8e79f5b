"""VllmHook `offloading`: adapts vLLM's `OffloadingConnector`, whose stores may read freed blocks.

The connector stores a prompt's chunks under the hash of their tokens. It plans a store in one step,
and its workers copy the blocks during later steps. vLLM alone keeps a running request's blocks, so
it finishes pending stores only before blocks of ended or preempted requests are written again.
Packing frees blocks of running requests, and writes to others. So there are three rules:

* A freed block is fenced: if it is allocated again, the workers finish its stores before that step.
* Before packing, the workers finish the stores that read a destination block.
* After a request is packed, its blocks are not stored, because they hold other tokens. If it is
  preempted, its prompt may be stored again.
"""

from collections.abc import Callable, Collection
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as vllm_connector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.v1.request import Request

from vllm_kvcompress.errors import VllmHookError

_ATTRIBUTES = ("_block_id_to_pending_jobs", "_jobs", "_req_status")
"""Private attributes of vLLM's scheduler side that this module reads and changes."""


class OffloadingConnector(vllm_connector.OffloadingConnector):
    """vLLM's connector beside compression. vLLM creates one in the scheduler and in each worker."""

    _longest_hit: Callable[[Request], int]

    def bind(self, longest_hit: Callable[[Request], int]) -> None:
        """Connect the scheduler's connector to its scheduler.

        Args:
            longest_hit: returns how many tokens of a waiting prompt need not be computed here.

        Raises:
            VllmHookError: vLLM's connector has no such attributes.
        """
        missing = [name for name in _ATTRIBUTES if not hasattr(self.scheduler, name)]
        if missing:
            raise VllmHookError(
                f"vLLM's OffloadingConnectorScheduler has no attributes {missing}",
                "install a vLLM that was tested with offloading, or remove --kv-offloading-size",
            )
        self._longest_hit = longest_hit

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens of a waiting prompt can be loaded, as vLLM does.

        No token of the request is packed yet, or any more: its own limit of stores holds again.
        """
        limit = (request.kv_transfer_params or {}).get("max_offload_tokens")
        status = self.scheduler._req_status[request.request_id]
        status.max_offload_tokens = limit if type(limit) is int and limit >= 0 else None
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def _max_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens a load may add; None for no limit.

        Tokens whose queries the method reads are computed here, so they are not loaded.
        """
        longest_hit = self._longest_hit(request)
        if longest_hit >= int(request.num_tokens) - 1:
            return None
        block_size = int(self.scheduler.config.kv_group_configs[0].tokens_per_block)
        return max(longest_hit - longest_hit % block_size - num_computed_tokens, 0)

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
