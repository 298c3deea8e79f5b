"""vLLM's CPU offloading with a worker that copies as late as vLLM allows, on a CPU.

Connector, scheduler side and manager of host memory are vLLM's. Only the worker is ours, because
vLLM's own needs CUDA. It also reads a store's blocks only when it copies them.
"""

import random
from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

MAX_POLLS = 20
BYTES = "cpu_bytes_to_use"


class LateWorker(OffloadingWorker):
    """Copies the blocks of a transfer after 0 to `MAX_POLLS` polls, or when vLLM waits for it.

    Args:
        caches: tensors of int8 ``[blocks, bytes]``.
        blocks_per_chunk: blocks in a chunk of host memory.
        seed: of the delays.
    """

    def __init__(self, caches: Any, blocks_per_chunk: int, seed: int) -> None:
        self._tensors = [cache.tensor for cache in caches.tensors]
        self._blocks_per_chunk, self._delays = blocks_per_chunk, random.Random(seed)
        # chunk id, and block in the chunk -> the block's bytes in each tensor
        self.host: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._pending: dict[int, list[Any]] = {}
        self._done: list[TransferResult] = []
        self.loaded_blocks = self.waits = 0

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, True, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.loaded_blocks += len(dst_spec.block_ids)
        return self._submit(job_id, False, dst_spec, src_spec)

    def _submit(self, job_id: int, stores: bool, blocks: Any, chunks: Any) -> bool:
        (start,) = blocks.block_indices
        places = [
            (int(chunks.block_ids[index // self._blocks_per_chunk]), index % self._blocks_per_chunk)
            for index in range(start % self._blocks_per_chunk, 10**6)[: len(blocks.block_ids)]
        ]
        block_ids = [int(block_id) for block_id in blocks.block_ids]
        assert 0 not in block_ids  # the null block
        polls = self._delays.randint(0, MAX_POLLS)
        self._pending[job_id] = [polls, stores, block_ids, places]
        return True

    def _copy(self, job_id: int) -> None:
        _, stores, block_ids, places = self._pending.pop(job_id)
        for block_id, place in zip(block_ids, places, strict=True):
            if stores:
                self.host[place] = [tensor[block_id].clone() for tensor in self._tensors]
                continue
            for tensor, block in zip(self._tensors, self.host[place], strict=True):
                tensor[block_id].copy_(block)
        size = len(block_ids) * sum(tensor.shape[1] for tensor in self._tensors)
        self._done.append(
            TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=1e-3)
        )

    def get_finished(self) -> list[TransferResult]:
        for job_id, transfer in [*self._pending.items()]:
            transfer[0] -= 1
            if transfer[0] < 0:
                self._copy(job_id)
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids & self._pending.keys()):
            self.waits += 1
            self._copy(job_id)


class LateSpec(CPUOffloadingSpec):
    """vLLM's spec with a `LateWorker`."""

    workers: list[LateWorker] = []  # noqa: RUF012, of all engines in this process
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


def transfer(mebibytes: float = 512, **keys: Any) -> dict[str, Any]:
    """Return the options of an engine whose host memory holds `mebibytes`."""
    return {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {BYTES: int(mebibytes * 2**20), **keys},
        }
    }


class StoredChunks:
    """Records the contents of each chunk when it is stored, and how many stores were refused.

    Args:
        llm: an engine whose worker is in this process.
    """

    def __init__(self, llm: Any) -> None:
        self._worker = LateSpec.workers[-1]
        self._manager = llm.scheduler.connector.connector_scheduler.manager
        self.contents: list[tuple[bytes, list[torch.Tensor]]] = []
        self.refused = 0
        prepare, complete = self._manager.prepare_store, self._manager.complete_store

        def preparing(*args: Any, **kwargs: Any) -> Any:
            prepared = prepare(*args, **kwargs)
            self.refused += prepared is None
            return prepared

        def completing(keys: Any, *args: Any, **kwargs: Any) -> Any:
            for key in keys:
                self.contents.append((bytes(key), self._chunk(key)))
            return complete(keys, *args, **kwargs)

        self._manager.prepare_store, self._manager.complete_store = preparing, completing

    def _chunk(self, key: Any) -> list[torch.Tensor]:
        chunk_id, host = self._manager._policy.get(key).chunk_id, self._worker.host
        blocks = [host[chunk_id, index] for index in range(self._worker._blocks_per_chunk)]
        return [torch.cat(parts).view(torch.float32) for parts in zip(*blocks, strict=True)]

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
