"""Seam `scheduler`: vLLM's schedulers, with the step's compressions on their output.

Both of vLLM's schedulers are subclassed, because one that is not an `AsyncScheduler` would lose
async scheduling. Nothing of their bodies is repeated.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_kvcompress.engine.kv_cache import CompressedManager
from vllm_kvcompress.errors import SeamError


class _Compressing:
    """Mixin before a vLLM scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers  # type: ignore[attr-defined]
        ours = [manager for manager in managers if isinstance(manager, CompressedManager)]
        if len(ours) != 1 or len(managers) != 1:
            raise SeamError(
                "compression needs exactly one KV cache group, managed by CompressedManager; got"
                f" {[type(manager).__name__ for manager in managers]}"
            )
        self.compressed_manager = ours[0]
        self.compressed_manager.follow(self.requests)  # type: ignore[attr-defined]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        output.kvcompress = self.compressed_manager.take_step()
        return output


class CompressingScheduler(_Compressing, Scheduler):
    """vLLM's synchronous scheduler."""


class CompressingAsyncScheduler(_Compressing, AsyncScheduler):
    """vLLM's async scheduler."""
