"""vLLM's two CPU offloading connectors with workers that copy as late as vLLM allows, on a CPU.

Connectors, scheduler sides and managers of host memory are vLLM's. Only the copies are ours,
because vLLM's own need CUDA. They also read a store's blocks only when they copy them.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

MAX_POLLS = 20
BYTES = "cpu_bytes_to_use"


class LateCopies:
    """Copies blocks 0 to `MAX_POLLS` polls after they are submitted, or when vLLM waits for them.

    Args:
        tensors: the KV cache, each ``[blocks, bytes]`` int8.
        seed: of the delays.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], seed: int) -> None:
        self.tensors, self._delays = tensors, random.Random(seed)
        # place in host memory -> the block's bytes in each tensor
        self.host: dict[Any, list[torch.Tensor]] = {}
        self._pending: dict[Any, list[Any]] = {}
        self.loaded_blocks = self.stored_blocks = self.waits = 0

    @property
    def pending(self) -> list[Any]:
        """Return the ids of the copies that have not run, oldest first."""
        return [*self._pending]

    def submit(self, copy_id: Any, block_ids: Any, places: Sequence[Any], *, stores: bool) -> None:
        block_ids = [int(block_id) for block_id in block_ids]
        assert 0 not in block_ids  # the null block
        if not stores:
            self.loaded_blocks += len(block_ids)
        polls = self._delays.randint(0, MAX_POLLS)
        self._pending[copy_id] = [polls, stores, block_ids, places]

    def poll(self, copy_ids: Iterable[Any]) -> list[Any]:
        """Count a poll of some copies, run those that are due, and return their ids."""
        due = []
        for copy_id in copy_ids:
            self._pending[copy_id][0] -= 1
            if self._pending[copy_id][0] < 0:
                due.append(copy_id)
        for copy_id in due:
            self._run(copy_id)
        return due

    def wait(self, copy_id: Any) -> None:
        """Run the copy now."""
        self.waits += 1
        self._run(copy_id)

    def _run(self, copy_id: Any) -> None:
        _, stores, block_ids, places = self._pending.pop(copy_id)
        self.stored_blocks += len(block_ids) if stores else 0
        for block_id, place in zip(block_ids, places, strict=True):
            if stores:
                self.host[place] = [tensor[block_id].clone() for tensor in self.tensors]
                continue
            for tensor, block in zip(self.tensors, self.host[place], strict=True):
                tensor[block_id].copy_(block)


class LateWorker(OffloadingWorker):
    """The worker of `OffloadingConnector`.

    Args:
        caches: tensors of int8 ``[blocks, bytes]``.
        blocks_per_chunk: blocks in a chunk of host memory.
        seed: of the delays.
    """

    def __init__(self, caches: Any, blocks_per_chunk: int, seed: int) -> None:
        self.copies = LateCopies([cache.tensor for cache in caches.tensors], seed)
        self.blocks_per_chunk = blocks_per_chunk
        self._sizes: dict[int, int] = {}
        self._done: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, stores=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, dst_spec, src_spec, stores=False)

    def _submit(self, job_id: int, blocks: Any, chunks: Any, *, stores: bool) -> bool:
        (start,) = blocks.block_indices
        places = [
            (int(chunks.block_ids[index // self.blocks_per_chunk]), index % self.blocks_per_chunk)
            for index in range(start % self.blocks_per_chunk, 10**6)[: len(blocks.block_ids)]
        ]
        self._sizes[job_id] = len(places) * sum(cache.shape[1] for cache in self.copies.tensors)
        self.copies.submit(job_id, blocks.block_ids, places, stores=stores)
        return True

    def get_finished(self) -> list[TransferResult]:
        self._done += self.copies.poll(self.copies.pending)
        done, self._done = self._done, []
        return [
            TransferResult(
                job_id=each,
                success=True,
                transfer_size=self._sizes.pop(each),
                transfer_time=1e-3,
            )
            for each in done
        ]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids.intersection(self.copies.pending)):
            self.copies.wait(job_id)
            self._done.append(job_id)


class LateEvent(NamedTuple):
    """The CUDA event behind a copy of vLLM's `SimpleCPUOffloadWorker`."""

    copies: LateCopies
    copy_id: tuple[bool, int]

    def query(self) -> bool:
        return self.copy_id not in self.copies.pending

    def synchronize(self) -> None:
        if not self.query():
            self.copies.wait(self.copy_id)


class LateSimpleWorker(SimpleCPUOffloadWorker):
    """vLLM's worker of `SimpleCPUOffloadConnector`, with `LateCopies` instead of CUDA streams."""

    blocks_per_chunk = 1

    def register_kv_caches(self, kv_caches: Any) -> None:
        streams = MagicMock()
        streams.priority_range.return_value = (0, 0)
        with patch.object(torch.cuda, "Stream", streams):
            super().register_kv_caches(kv_caches)
        self.load_stream = None

    def _init_cpu_mode(self, caches: Any, *_: Any) -> None:
        self.copies, self._backend = LateCopies([*caches.values()], LateSpec.seed), self
        LateSpec.workers.append(self)

    def launch_copy(
        self,
        source: list[int],
        destination: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[Any],
        **_: Any,
    ) -> None:
        blocks, places = (source, destination) if is_store else (destination, source)
        copy_id = is_store, event_idx
        self.copies.submit(copy_id, blocks, [(place, 0) for place in places], stores=is_store)
        events_list.append((event_idx, LateEvent(self.copies, copy_id)))

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        self.copies.poll(self.copies.pending)
        return super().get_finished(finished_req_ids)

    def wait_for_save(self) -> None:
        with patch.multiple(torch, Event=MagicMock(), cuda=MagicMock()):
            super().wait_for_save()


class LateSpec(CPUOffloadingSpec):
    """vLLM's spec with a `LateWorker`."""

    workers: list[Any] = []  # noqa: RUF012, of all engines in this process, of both connectors
    seed = 0

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        worker = LateWorker(kv_caches, self.blocks_per_chunk, self.seed)
        self.workers.append(worker)
        return worker


def install_late_copies(seed: int) -> None:
    """Give every later engine with vLLM's offloading in this process a `LateWorker`."""
    LateSpec.seed = seed
    OffloadingSpecFactory._registry["CPUOffloadingSpec"] = lambda: LateSpec


def install(monkeypatch: Any, seed: int) -> None:
    """Do the same for one test."""
    monkeypatch.setattr(LateSpec, "seed", seed)
    monkeypatch.setitem(OffloadingSpecFactory._registry, "CPUOffloadingSpec", lambda: LateSpec)
    monkeypatch.setattr(simple_cpu_offload_connector, "SimpleCPUOffloadWorker", LateSimpleWorker)


def transfer(
    mebibytes: float = 512, connector: str = "OffloadingConnector", **keys: Any
) -> dict[str, Any]:
    """Return the options of an engine whose host memory holds `mebibytes`."""
    return {
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {BYTES: int(mebibytes * 2**20), **keys},
        }
    }


class StoredChunks:
    """Records the contents of each chunk when it is stored, refused stores, and evicted blocks.

    `refused` counts stores of `OffloadingConnector`, and `evicted` the blocks that
    `SimpleCPUOffloadConnector` evicted from host memory.

    Args:
        llm: an engine whose worker is in this process.
    """

    def __init__(self, llm: Any) -> None:
        self._worker = LateSpec.workers[-1]
        self.contents: list[tuple[bytes, list[torch.Tensor]]] = []
        self.refused = self.evicted = 0
        connector = llm.scheduler.connector
        if isinstance(self._worker, LateSimpleWorker):
            self._record_simple(connector.scheduler_manager)
        else:
            self._record(connector.connector_scheduler.manager)

    def _record(self, manager: Any) -> None:
        """Record the chunks of `OffloadingConnector`."""
        prepare, complete = manager.prepare_store, manager.complete_store

        def preparing(*args: Any, **kwargs: Any) -> Any:
            prepared = prepare(*args, **kwargs)
            self.refused += prepared is None
            return prepared

        def completing(keys: Any, *args: Any, **kwargs: Any) -> Any:
            for key in keys:
                self._add(bytes(key), manager._policy.get(key).chunk_id)
            return complete(keys, *args, **kwargs)

        manager.prepare_store, manager.complete_store = preparing, completing

    def _record_simple(self, manager: Any) -> None:
        """Record the blocks of `SimpleCPUOffloadConnector`, by keys of `OffloadingConnector`."""
        complete, pool = manager._process_store_completion, manager._gpu_block_pool
        host_pool = manager.cpu_block_pool
        evict = host_pool._maybe_evict_cached_block

        def completing(block_ids: Any, places: Any, *args: Any) -> None:
            for block_id, place in zip(block_ids, places, strict=True):
                # Both keys are vLLM's hash and the number of the cache group.
                self._add(bytes(pool.blocks[block_id].block_hash), place)
            complete(block_ids, places, *args)

        def evicting(block: Any) -> bool:
            is_evicted = bool(evict(block))
            self.evicted += is_evicted
            return is_evicted

        manager._process_store_completion = completing
        host_pool._maybe_evict_cached_block = evicting

    def _add(self, key: bytes, chunk_id: int) -> None:
        host = self._worker.copies.host
        blocks = [host[chunk_id, index] for index in range(self._worker.blocks_per_chunk)]
        content = [torch.cat(parts).view(torch.float32) for parts in zip(*blocks, strict=True)]
        self.contents.append((key, content))

    def compare(self, expected: Mapping[bytes, list[torch.Tensor]]) -> tuple[int, int]:
        """Return how many chunks were stored, and how many of them differ from `expected`."""
        differing = sum(
            not all(
                torch.allclose(own, other, rtol=1e-3, atol=1e-4)
                for own, other in zip(content, expected[key], strict=True)
            )
            for key, content in self.contents
        )
        return len(self.contents), differing
