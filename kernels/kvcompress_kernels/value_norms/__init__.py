"""L1 norm of each cached value."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_floats, check_pages, require


def value_norms(value_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the L1 norm of each cached value: ``n[g, j] = sum_d |v[g, j, d]|``, in float32.

    Equal values have equal norms at any position.

    Args:
        value_pages: ``[N, Hkv, block_size, D]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order.
        tokens: prompt tokens.

    Returns:
        ``[Hkv, tokens]`` float32. For a quantised V, multiply by its scale to compare layers.

    Raises:
        ValueError: Shapes disagree, `tokens` is 0, or `value_pages` has no float dtype.
    """
    name = "value_norms"
    require(value_pages.dim() == 4, name, "value_pages must be [N, Hkv, bs, D]", value_pages.shape)
    check_floats(name, "value_pages", value_pages)
    require(tokens > 0, name, "tokens must be positive", tokens)
    check_pages(name, pages, tokens, value_pages.shape[2])
    if contract.runs_triton(value_pages):
        from kvcompress_kernels.value_norms.triton import run
    else:
        from kvcompress_kernels.value_norms.cpu import run

    return run(value_pages, pages, tokens)
