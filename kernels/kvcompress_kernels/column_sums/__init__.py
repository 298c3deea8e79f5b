"""Sum of the attention that each token receives."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_keys, check_pages, check_tensor, require

_NAME = "column_sums"


def column_sums(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the attention of the last T tokens to each token: ``c[h, j] = sum_i A[h, i, j]``.

    ``A = softmax(scale * q k^T)``, row by row and causal (docs/methods.md 3; H2O,
    arXiv:2306.14048). The zero-padded sums of a prompt's chunks add up to the sums of the prompt,
    whose total is `tokens` per query head, or less with sinks. Query head h reads KV head
    ``h // (Hq // Hkv)``.

    Args:
        query: ``[T, Hq, D]`` any float dtype, rotated: positions ``tokens - T`` to ``tokens - 1``.
        key_pages: ``[N, Hkv, D, block_size]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order.
        tokens: prompt tokens computed so far, including those of `query`.
        scale: factor on the logits, usually ``D ** -0.5``, times the scale of a quantised K.
        sinks: ``[Hq]`` float32 attention sink logits, or None.

    Returns:
        ``[Hq, tokens]`` float32.

    Raises:
        ValueError: Shapes disagree, or `query` is empty or longer than the prompt.
    """
    count, heads, dim = query.shape
    check_keys(_NAME, key_pages)
    _, kv_heads, key_dim, block = key_pages.shape
    require(key_dim == dim, _NAME, f"key_pages must have head dim {dim}", key_dim)
    require(heads % kv_heads == 0, _NAME, f"Hq must be a multiple of Hkv={kv_heads}", heads)
    require(0 < count <= tokens, _NAME, "0 < T <= tokens must hold", (count, tokens))
    check_pages(_NAME, pages, tokens, block)
    if sinks is not None:
        check_tensor(_NAME, "sinks", sinks, (heads,), torch.float32)
    if contract.runs_triton(query):
        from kvcompress_kernels.column_sums.triton import run
    else:
        from kvcompress_kernels.column_sums.cpu import run

    return run(query, key_pages, pages, tokens, scale, sinks)
