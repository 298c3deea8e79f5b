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
        self._logits = _LayerScale(self.logits, device)
        self._values = _LayerScale(self.values, device)

    def of_layers(self, layers: Sequence[int]) -> float | torch.Tensor:
        """Return the logit scales of n layers: one number if all layers are equal, else ``[n]``.

        Copies nothing between host and device.
        """
        return self._logits.of_layers(layers)

    def values_of_layers(self, layers: Sequence[int]) -> float | torch.Tensor:
        """Return the value scales of n layers, as `of_layers`."""
        return self._values.of_layers(layers)

    def of_requests(self, count: int) -> float | torch.Tensor:
        """Return the logit scales of all layers, repeated for `count` requests."""
        return self._logits.of_requests(count)

    def sinks_of(self, layer: int) -> torch.Tensor | None:
        """Return the sinks ``[Hq]`` of one layer."""
        return None if self.sinks is None else self.sinks[layer]

    def sinks_of_layers(self, layers: Sequence[int]) -> torch.Tensor | None:
        """Return the sinks ``[n, Hq]`` of n layers, without copies between host and device."""
        return None if self.sinks is None else _rows_of(self.sinks, layers)

    def sinks_of_requests(self, count: int) -> torch.Tensor | None:
        """Return the sinks of all layers, repeated for `count` requests."""
        return None if self.sinks is None else self.sinks.repeat(count, 1)


class _LayerScale:
    """One positive factor per layer.

    Args:
        factors: by layer.
        device: device on which tokens are scored.
    """

    def __init__(self, factors: Sequence[float], device: torch.device) -> None:
        self._uniform = factors[0] if len(set(factors)) == 1 else None
        self._by_layer = torch.tensor(factors, dtype=torch.float32, device=device)

    def of_layers(self, layers: Sequence[int]) -> float | torch.Tensor:
        return _rows_of(self._by_layer, layers) if self._uniform is None else self._uniform

    def of_requests(self, count: int) -> float | torch.Tensor:
        return self._by_layer.repeat(count) if self._uniform is None else self._uniform


def _rows_of(by_layer: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Return the rows of n layers without copying an index to the device."""
    if layers[-1] - layers[0] + 1 == len(layers):
        return by_layer[layers[0] : layers[-1] + 1]
    return torch.cat([by_layer[layer : layer + 1] for layer in layers])
