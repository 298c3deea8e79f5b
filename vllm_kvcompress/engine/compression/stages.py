"""Pipeline stages: each packs its own layers, and the last stage reports for all of them."""

from collections.abc import Sequence

import torch
from vllm.distributed import get_pp_group

from vllm_kvcompress.devices import to_device


class Stages:
    """Compressed layers by pipeline stage, and this worker's stage.

    vLLM only reads the output of the last stage. The other stages send their layers' counts to it,
    device to device, after all other messages of the step between the two ranks. Both ranks follow
    the same plan, so they agree on the messages, and the host never waits.

    Args:
        layers: for each stage, the model-wide indices of its compressed layers; equally many on
            every stage.
        stage: this worker's stage.
        device: device of the sent tensors; required if there are several stages.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[int]],
        stage: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self.own_layers = tuple(layers[stage])
        self.all_layers = tuple(layer for stage_layers in layers for layer in stage_layers)
        self._num_stages, self._stage = len(layers), stage
        # Tensors in flight: their memory must not be reused before they arrive.
        self._sent: list[tuple[torch.distributed.Work, torch.Tensor]] = []

    def gather(self, counts: torch.Tensor) -> torch.Tensor | None:
        """Return the counts of all stages' layers on the last stage; send them elsewhere.

        Args:
            counts: ``[L]`` integers for this stage's layers, on the device that computed them.

        Returns:
            ``[stages * L]`` on the last stage, None on the others.
        """
        if self._num_stages == 1:
            return counts
        assert self._device is not None
        group, last_stage = get_pp_group(), self._num_stages - 1
        own_counts = to_device(counts, torch.int32, self._device)
        if self._stage < last_stage:
            work = torch.distributed.isend(
                own_counts, group.ranks[last_stage], group=group.device_group
            )
            assert work is not None, "this rank is not in the pipeline's group"
            self._sent.append((work, own_counts))
            return None
        received = [torch.empty_like(own_counts) for _ in range(last_stage)]
        for stage, stage_counts in enumerate(received):
            torch.distributed.recv(stage_counts, group.ranks[stage], group=group.device_group)
        return torch.cat([*received, own_counts])

    def wait_for_sent(self) -> None:
        """Wait for earlier steps' messages and free them; the receiver has read them by now."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
