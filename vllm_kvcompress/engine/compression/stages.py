"""Pipeline stages: each packs its own layers, and the last one reports what all of them kept."""

from collections.abc import Sequence

import torch
from vllm.distributed import get_pp_group

from vllm_kvcompress.devices import to_device


class Stages:
    """This worker's place in the pipeline.

    vLLM hears the last stage alone. The others send it what is told of their layers, from
    device to device and behind everything else that this pair of ranks exchanges in a step: all
    follow the same plan, so both know what is sent, and the host waits for nothing.

    Args:
        layers: per stage, the layers on it that are compressed, by their number in the model; as
            many on each.
        stage: this worker's.
        device: where what is sent lies; needed where there are several.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[int]],
        stage: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self.own = tuple(layers[stage])
        self.every = tuple(layer for each in layers for layer in each)
        self._count, self._stage = len(layers), stage
        # What is on its way, which must stay as it is.
        self._sent: list[tuple[torch.distributed.Work, torch.Tensor]] = []

    def gathered(self, told: torch.Tensor) -> torch.Tensor | None:
        """What is told of the layers of all stages, where this is the last one; else None.

        Args:
            told: ``[L, n]`` integers, of this stage's layers, where they were computed.
        """
        if self._count == 1:
            return told
        assert self._device is not None
        group, last = get_pp_group(), self._count - 1
        own = to_device(told, torch.int32, self._device)
        if self._stage < last:
            work = torch.distributed.isend(own, group.ranks[last], group=group.device_group)
            assert work is not None, "this rank is not of the pipeline's group"
            self._sent.append((work, own))
            return None
        found = [torch.empty_like(own) for _ in range(last)]
        for stage, part in enumerate(found):
            torch.distributed.recv(part, group.ranks[stage], group=group.device_group)
        return torch.cat([*found, own])

    def wait_for_sent(self) -> None:
        """Forget what arrived: nothing of an earlier step is waited for by another rank."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
