"""Where an ordinary page stores the keys and values of a head."""

from typing import NamedTuple

import torch


class Offsets(NamedTuple):
    """Offsets in elements from the start of a head's part of a page; all are int32.

    Element d of token t is at ``tokens[t] + dims[d]``, for K and for V.
    """

    key_tokens: torch.Tensor
    """``[block_size]``."""
    key_dims: torch.Tensor
    """``[D]``."""
    value_tokens: torch.Tensor
    """``[block_size]``."""
    value_dims: torch.Tensor
    """``[D]``."""
