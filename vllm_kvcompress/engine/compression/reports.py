"""What a worker has packed, told once its device has done it. Nothing waits for the device."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from vllm.logger import init_logger

from vllm_kvcompress.engine.compression.role_counts import Counted
from vllm_kvcompress.engine.compression.stages import Stages
from vllm_kvcompress.engine.messages.step import Packed, PackRequest, RoleKept

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
    """A prompt that the device may still be packing.

    Args:
        told: ``[L, 1 + R]`` int32, of every layer its pages, and what was counted of each role.
        counted: whose roles these are; None where nobody asks.
    """

    pack_request: PackRequest
    told: torch.Tensor
    counted: Counted | None
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

    def add(
        self,
        pack_request: PackRequest,
        pages: torch.Tensor,
        stopwatch: Stopwatch,
        counted: Counted | None = None,
    ) -> None:
        """A prompt whose packing was launched, its last one if it is packed in pieces.

        Args:
            pages: ``[L]``, pages that each layer keeps, on the device.
            stopwatch: of its scoring and packing.
            counted: what is kept of each role; None where the request does not ask.
        """
        own = pages[:, None]
        if counted is not None:
            own = torch.cat([own, counted.pairs.to(own.dtype)], dim=1)
        told = self.stages.gathered(own)
        if told is None:
            return
        # The copy's end is the last thing that is asked of the device.
        with stopwatch.running():
            if told.is_cuda:
                here = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
                told = here.copy_(told, non_blocking=True)
        self._pending.append(_Pending(pack_request, told, counted, stopwatch))

    def take(self) -> list[Packed]:
        """Those that the device has packed since the last call."""
        done = []
        while self._pending and self._pending[0].stopwatch.done:
            pending = self._pending.popleft()
            done.append(_packed(pending, self.stages.every))
            if self.log:
                _log(done[-1], pending.pack_request)
        return done


def _packed(pending: _Pending, layers: tuple[int, ...]) -> Packed:
    pack_request, plan = pending.pack_request, pending.pack_request.plan
    told: list[list[int]] = pending.told.tolist()
    by_role = tuple[RoleKept, ...]()
    if pending.counted is not None:
        by_role = pending.counted.shares(pack_request, [pairs for _, *pairs in told])
    return Packed(
        request_id=pack_request.request_id,
        method=pack_request.settings.compress,
        tokens=pack_request.prompt_tokens,
        answered=pack_request.answered or 0,
        layers=layers,
        layer_tokens=tuple(pages * plan.block_size + plan.tail for pages, *_ in told),
        seconds=pending.stopwatch.seconds,
        by_role=by_role,
    )


def _log(done: Packed, pack_request: PackRequest) -> None:
    tail_blocks = int(pack_request.plan.tail > 0)
    logger.info(
        "kv-compress: request=%s prompt_tokens=%d kept_tokens=%.1f lookahead=%d blocks_before=%d"
        " blocks_after=%d layer_tokens=%s",
        done.request_id,
        done.tokens,
        done.kept,
        done.answered,
        pack_request.tokens // pack_request.plan.block_size + tail_blocks,
        pack_request.plan.blocks + tail_blocks,
        str(list(done.layer_tokens)).replace(" ", ""),
    )
