"""Scales and attention sinks of each layer."""

from collections.abc import Sequence

import torch


class Scales:
    """Scales of every compressed layer on this worker, all positive.

    Args:
        logits: by layer, the factor on query times cached key: the model's softmax scale, times the
            scale of quantised keys and of quantised queries.
        values: by layer, the factor on a cached value.
        device: device on which tokens are scored.
        sinks: ``[L, Hq]`` float32 on `device`, the sink logit of each query head; None if the model
            has no sinks.
    """

    def __init__(
        self,
        logits: Sequence[float],
        values: Sequence[float],
        device: torch.device,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.logits, self.values = tuple(logits), tuple(values)
        self.sinks = sinks
        self._uniform = len(set(self.logits)) == 1
        self._logits_on_device = torch.tensor(self.logits, dtype=torch.float32, device=device)

    def of_layers(self, layers: Sequence[int]) -> float | torch.Tensor:
        """Return the logit scales of n layers: one number if all layers are equal, else ``[n]``.

        Copies nothing between host and device.
        """
        if self._uniform:
            return self.logits[0]
        return torch.cat([self._logits_on_device[layer : layer + 1] for layer in layers])

    def of_requests(self, count: int) -> float | torch.Tensor:
        """Return the logit scales of all layers, repeated for `count` requests."""
        return self.logits[0] if self._uniform else self._logits_on_device.repeat(count)

    def sinks_of(self, layer: int) -> torch.Tensor | None:
        """Return the sinks ``[Hq]`` of one layer."""
        return None if self.sinks is None else self.sinks[layer]

    def sinks_of_layers(self, layers: Sequence[int]) -> torch.Tensor | None:
        """Return the sinks ``[n, Hq]`` of n layers, without copies between host and device."""
        if self.sinks is None:
            return None
        return torch.cat([self.sinks[layer : layer + 1] for layer in layers])

    def sinks_of_requests(self, count: int) -> torch.Tensor | None:
        """Return the sinks of all layers, repeated for `count` requests."""
        return None if self.sinks is None else self.sinks.repeat(count, 1)
