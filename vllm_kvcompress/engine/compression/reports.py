"""What a worker has packed, told once its device has done it. Nothing waits for the device."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_kvcompress.engine.compression.stages import Stages
from vllm_kvcompress.engine.messages.step import Pack, Packed

logger = init_logger("vllm.kvcompress")


class Stopwatch:
    """Adds up the time that a device spends between the ends of `running`.

    A GPU's own clock is read, by events, since its work goes on after the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    @property
    def done(self) -> bool:
        """Whether the device has come to the last end."""
        return not self._events or bool(self._events[-1][1].query())

    @property
    def seconds(self) -> float:
        """Asked when `done`."""
        milliseconds = sum(start.elapsed_time(end) for start, end in self._events)
        return float(self._seconds + milliseconds / 1000)


@dataclass(slots=True)
class _Pending:
    todo: Pack
    pages: torch.Tensor
    stopwatch: Stopwatch


@dataclass(slots=True)
class Reports:
    """The prompts that were packed and not reported yet, oldest first.

    Args:
        stages: of the pipeline, of which the last one reports what all layers keep.
        log: also log a line for each.
    """

    stages: Stages
    log: bool = False
    _pending: deque[_Pending] = field(default_factory=deque)

    def add(self, todo: Pack, pages: torch.Tensor, stopwatch: Stopwatch) -> None:
        """A prompt whose packing was launched, its last one if it is packed in pieces.

        Args:
            pages: ``[L]``, pages that each layer keeps, on the device.
            stopwatch: of its scoring and packing.
        """
        every = self.stages.gathered(pages)
        if every is None:
            return
        pages = every
        # The copy's end is the last thing that is asked of the device.
        with stopwatch.running():
            if pages.is_cuda:
                here = torch.empty(pages.shape, dtype=pages.dtype, pin_memory=True)
                pages = here.copy_(pages, non_blocking=True)
        self._pending.append(_Pending(todo, pages, stopwatch))

    def take(self) -> list[Packed]:
        """Those that the device has packed since the last call."""
        done = []
        while self._pending and self._pending[0].stopwatch.done:
            pending = self._pending.popleft()
            done.append(_packed(pending, self.stages.every))
            if self.log:
                _log(done[-1], pending.todo)
        return done


def _packed(pending: _Pending, layers: tuple[int, ...]) -> Packed:
    plan = pending.todo.plan
    pages: list[Any] = pending.pages.tolist()
    return Packed(
        request_id=pending.todo.request_id,
        method=pending.todo.settings.compress,
        tokens=pending.todo.prompt_tokens,
        answered=pending.todo.answered or 0,
        layers=layers,
        layer_tokens=tuple(int(count) * plan.block_size + plan.tail for count in pages),
        seconds=pending.stopwatch.seconds,
    )


def _log(done: Packed, todo: Pack) -> None:
    tail_blocks = int(todo.plan.tail > 0)
    logger.info(
        "kv-compress: request=%s prompt_tokens=%d kept_tokens=%.1f lookahead=%d blocks_before=%d"
        " blocks_after=%d layer_tokens=%s",
        done.request_id,
        done.tokens,
        done.kept,
        done.answered,
        todo.tokens // todo.plan.block_size + tail_blocks,
        todo.plan.blocks + tail_blocks,
        str(list(done.layer_tokens)).replace(" ", ""),
    )
