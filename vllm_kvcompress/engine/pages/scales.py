"""What a layer's attention adds to the numbers in its cache: their scales, and its sinks."""

from collections.abc import Sequence

import torch


class Scales:
    """Factors of every layer of this worker, all positive.

    Args:
        logits: on query times cached key: the model's, times the scale of a quantised key, times
            that of queries which arrive quantised.
        values: on a cached value.
        device: where rows of several layers are scored.
        sinks: ``[L, Hq]`` float32 there, the logits of the query heads' sinks; None without.
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
        self._same = len(set(self.logits)) == 1
        self._every = torch.tensor(self.logits, dtype=torch.float32, device=device)

    def of_layers(self, layers: Sequence[int]) -> float | torch.Tensor:
        """Scales of some layers' logits: one number where all layers share it, else ``[n]``.

        No value leaves the device or comes to it.
        """
        if self._same:
            return self.logits[0]
        return torch.cat([self._every[layer : layer + 1] for layer in layers])

    def of_requests(self, count: int) -> float | torch.Tensor:
        """Scales of the logits of all layers of `count` requests, one request after the other."""
        return self.logits[0] if self._same else self._every.repeat(count)

    def sinks_of(self, layer: int) -> torch.Tensor | None:
        """Sinks ``[Hq]`` of one layer."""
        return None if self.sinks is None else self.sinks[layer]

    def sinks_of_layers(self, layers: Sequence[int]) -> torch.Tensor | None:
        """Sinks ``[n, Hq]`` of some layers; no value leaves the device or comes to it."""
        if self.sinks is None:
            return None
        return torch.cat([self.sinks[layer : layer + 1] for layer in layers])

    def sinks_of_requests(self, count: int) -> torch.Tensor | None:
        """Sinks of all layers of `count` requests, one request after the other."""
        return None if self.sinks is None else self.sinks.repeat(count, 1)
