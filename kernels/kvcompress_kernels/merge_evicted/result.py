"""Result type of `merge_evicted`."""

from typing import NamedTuple

import torch


class Merged(NamedTuple):
    """Kept tokens of N rows, with the evicted tokens merged into them."""

    keys: torch.Tensor
    """``[N, Hkv, n, D]`` float32, or float64 for a float64 cache. Zero past each row's count."""
    values: torch.Tensor
    """``[N, Hkv, n, Dv]``, with the dtype and padding of `keys`."""
    threshold: torch.Tensor
    """``[N, Hkv]`` float32: minimum cosine of a merged token. Unchanged if none was evicted."""
