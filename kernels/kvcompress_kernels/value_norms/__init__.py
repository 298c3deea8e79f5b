"""How large each cached value is."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_floats, check_pages, require


def value_norms(value_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """L1 norm of each cached value: ``n[g, j] = sum_d |v[g, j, d]|``, summed in float32.

    Equal values have equal norms, wherever they lie.

    Args:
        value_pages: ``[N, Hkv, block_size, D]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order.
        tokens: prompt tokens.

    Returns:
        ``[Hkv, tokens]`` float32. Of a quantised V these are to be multiplied by its scale, which
        matters where layers are compared.

    Raises:
        ValueError: shapes disagree, there are no tokens, or `value_pages` are no floats.
    """
    name = "value_norms"
    require(value_pages.dim() == 4, name, "value_pages must be [N, Hkv, bs, D]", value_pages.shape)
    check_floats(name, "value_pages", value_pages)
    require(tokens > 0, name, "tokens must be positive", tokens)
    check_pages(name, pages, tokens, value_pages.shape[2])
    if contract.triton_takes(value_pages):
        from kvcompress_kernels.value_norms.triton import run
    else:
        from kvcompress_kernels.value_norms.cpu import run

    return run(value_pages, pages, tokens)
