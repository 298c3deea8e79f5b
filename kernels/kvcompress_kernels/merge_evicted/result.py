"""What `merge_evicted` returns."""

from typing import NamedTuple

import torch


class Merged(NamedTuple):
    """Kept tokens of N rows, with the evicted ones folded in."""

    keys: torch.Tensor
    """``[N, Hkv, n, D]`` float32, or float64 from such a cache; zeros behind a row's kept ones."""
    values: torch.Tensor
    """``[N, Hkv, n, Dv]``, likewise."""
    threshold: torch.Tensor
    """``[N, Hkv]`` float32: the cosine that a token needed; as given where none was evicted."""
