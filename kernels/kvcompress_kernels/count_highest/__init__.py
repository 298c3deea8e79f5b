"""For each layer, how many of the highest scores of the first layers it holds."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import require

_NAME = "count_highest"
_MAX_COLUMNS = 2**31 - 2**14
"""Columns are int32 on the GPU, also past the end of a layer's last tile."""


def count_highest(scores: torch.Tensor, keep: int, layers_per_update: int) -> torch.Tensor:
    """Return how many of the highest scores lie in each layer (docs/methods.md 2.4 and 2.6).

    Update u knows the first ``n = min((u + 1) * layers_per_update, N)`` layers and counts their
    ``keep * n // N`` highest scores. Ties go to the lower layer, and -0.0 equals 0.0. The number of
    launches depends on neither N nor the number of updates.

    Args:
        scores: ``[N, M]`` float32, contiguous, without NaN (unchecked).
        keep: number of scores that the last update counts over all layers, clamped to [0, N * M].
        layers_per_update: layers that each update adds to those of the update before.

    Returns:
        ``[ceil(N / layers_per_update), N]`` int64, 0 for the layers that an update does not know.

    Raises:
        ValueError: `scores` has another shape, dtype or layout, or `layers_per_update` is not
            positive.
    """
    shape = tuple(scores.shape)
    require(scores.dim() == 2, _NAME, "scores must be [N, M]", shape)
    require(scores.dtype == torch.float32, _NAME, "scores must be float32", scores.dtype)
    require(scores.is_contiguous(), _NAME, "scores must be contiguous", scores.stride())
    require(shape[1] <= _MAX_COLUMNS, _NAME, f"M must be at most {_MAX_COLUMNS}", shape)
    require(layers_per_update > 0, _NAME, "layers_per_update must be positive", layers_per_update)
    keep = min(max(keep, 0), scores.numel())
    if contract.runs_triton(scores):
        from kvcompress_kernels.count_highest.triton import run
    else:
        from kvcompress_kernels.count_highest.cpu import run

    return run(scores, keep, layers_per_update)
