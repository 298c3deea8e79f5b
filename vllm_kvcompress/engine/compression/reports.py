"""Reports packed prompts to the scheduler once the device has finished them, without syncs."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from vllm.logger import init_logger

from vllm_kvcompress.engine.compression.stages import Stages
from vllm_kvcompress.engine.messages.step import PackedPrompt, PackRequest
from vllm_kvcompress.errors import quoted_id

logger = init_logger("vllm.kvcompress")


class Stopwatch:
    """Accumulates the device time spent inside `running`.

    On a GPU it uses CUDA events, because the GPU finishes after the host has issued the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        # Start and end of each interval, and the number of stopwatches that share it.
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []

    @contextmanager
    def running(self, *, shared_by: int = 1) -> Iterator[None]:
        """Measure the body.

        Args:
            shared_by: number of stopwatches that measure it. Each counts an equal share.
        """
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end, shared_by))
        else:
            began = time.perf_counter()
            yield
            self._seconds += (time.perf_counter() - began) / shared_by

    @property
    def done(self) -> bool:
        """Return whether the device has finished the last `running` block."""
        return not self._events or bool(self._events[-1][1].query())

    @property
    def seconds(self) -> float:
        """Accumulated seconds; valid once `done`."""
        milliseconds = sum(start.elapsed_time(end) / share for start, end, share in self._events)
        return float(self._seconds + milliseconds / 1000)


@dataclass(slots=True)
class _Pending:
    """A prompt that the device may still be packing.

    Args:
        pack_request: its entry in the scheduler's plan.
        pages: ``[L]`` int32, pages that each compressed layer of the model keeps.
        stopwatch: measures scoring and packing.
    """

    pack_request: PackRequest
    pages: torch.Tensor
    stopwatch: Stopwatch


@dataclass(slots=True)
class Reports:
    """Queue of packed prompts that are not reported yet, oldest first.

    Args:
        stages: the pipeline stages; the last stage reports for the layers of all stages.
        log: whether to log a line for each prompt.
    """

    stages: Stages
    log: bool = False
    _pending: deque[_Pending] = field(default_factory=deque)

    def add(self, pack_request: PackRequest, pages: torch.Tensor, stopwatch: Stopwatch) -> None:
        """Queue a prompt whose packing (of the last piece, if in pieces) has been launched.

        Args:
            pack_request: its entry in the scheduler's plan.
            pages: ``[L]``, pages that each layer keeps, on the device.
            stopwatch: measures scoring and packing.
        """
        all_pages = self.stages.gather(pages)
        if all_pages is None:
            return
        # This copy is the last work on the device, so the stopwatch is done when it has arrived.
        with stopwatch.running():
            if all_pages.is_cuda:
                pinned = torch.empty(all_pages.shape, dtype=all_pages.dtype, pin_memory=True)
                all_pages = pinned.copy_(all_pages, non_blocking=True)
        self._pending.append(_Pending(pack_request, all_pages, stopwatch))

    def take(self) -> list[PackedPrompt]:
        """Return the prompts that the device has finished since the last call."""
        done = []
        while self._pending and self._pending[0].stopwatch.done:
            pending = self._pending.popleft()
            done.append(_packed(pending, self.stages.all_layers))
            if self.log:
                _log(done[-1], pending.pack_request)
        return done


def _packed(pending: _Pending, layers: tuple[int, ...]) -> PackedPrompt:
    """Return the report of a finished prompt.

    Args:
        layers: model-wide indices of all compressed layers.
    """
    pack_request, plan = pending.pack_request, pending.pack_request.plan
    output_tokens = pack_request.output_tokens or 0
    return PackedPrompt(
        request_id=pack_request.request_id,
        method=pack_request.settings.compress,
        tokens=pack_request.prompt_tokens,
        output_tokens=pack_request.output_tokens,
        layers=layers,
        # With a window shorter than the look-ahead, a layer may keep fewer tokens than that.
        layer_tokens=tuple(
            max(plan.layer_tokens(pages) - output_tokens, 0) for pages in pending.pages.tolist()
        ),
        seconds=pending.stopwatch.seconds,
    )


def _log(done: PackedPrompt, pack_request: PackRequest) -> None:
    logger.info(
        "kv-compress: request=%s prompt_tokens=%d kept_tokens=%.1f lookahead=%d blocks_before=%d"
        " blocks_after=%d layer_tokens=%s",
        quoted_id(done.request_id),
        done.tokens,
        done.kept_tokens,
        done.output_tokens or 0,
        -(-pack_request.tokens // pack_request.plan.block_size),
        pack_request.plan.held_blocks,
        str(list(done.layer_tokens)).replace(" ", ""),
    )
