"""What stands between the numbers in a layer's cache and the keys and values that they are."""

from collections.abc import Sequence

import torch


class Scales:
    """Factors of every layer of this worker, all positive.

    Args:
        logits: on query times cached key: the model's, times the scale of a quantised key, times
            that of queries which arrive quantised.
        values: on a cached value.
        device: where rows of several layers are scored.
    """

    def __init__(
        self, logits: Sequence[float], values: Sequence[float], device: torch.device
    ) -> None:
        self.logits, self.values = tuple(logits), tuple(values)
        self._same = len(set(self.logits)) == 1
        self._every = torch.tensor(self.logits, dtype=torch.float32, device=device)

    def of_layers(self, layers: Sequence[int]) -> float | torch.Tensor:
        """Of some layers' logits: one number where all layers of the model share it, else ``[n]``.

        No value leaves the device or comes to it.
        """
        if self._same:
            return self.logits[0]
        return torch.cat([self._every[layer : layer + 1] for layer in layers])

    def of_requests(self, count: int) -> float | torch.Tensor:
        """The same of all layers of so many requests, one request after the other."""
        return self.logits[0] if self._same else self._every.repeat(count)
