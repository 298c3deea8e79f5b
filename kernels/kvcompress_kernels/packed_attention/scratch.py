"""Scratch memory of `packed_attention`."""

import torch

from kvcompress_kernels import contract

SPLITS = 8
"""Maximum parts into which the CPU code splits the tokens of a row."""
LINES = 64
"""Maximum lines of a tile of the CPU code. A line is a query token of a query head."""
SPLIT_LINES = 16
"""Maximum lines of a row whose tokens are split, unless it has one query token."""
PROGRAMS = 1024
"""Maximum Triton programs of a launch that splits the tokens of its rows."""
PROGRAM_LINES = 16 * PROGRAMS
"""Maximum lines of the partial results of all these programs."""


def workspace(
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    rows: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Return scratch memory for calls of `packed_attention` with up to `rows` rows.

    A call leaves the memory ready for the next call, which must not run at the same time. A CUDA
    graph may record its address. Layers of equal shapes can share it.

    Args:
        query_heads, kv_heads, head_dim: shape of the layer.
        rows: rows of the largest batch, including padding.
        device: device of the cache.
    """
    memory = torch.zeros((), device=device)
    if contract.runs_triton(memory):
        return memory.new_zeros(triton_numbers(head_dim))
    counters = 2 * rows * kv_heads
    return memory.new_zeros(
        counters + rows * kv_heads * SPLITS * split_lines(query_heads // kv_heads) * (head_dim + 2)
    )


def triton_numbers(head_dim: int) -> int:
    """Return the float32 numbers of the Triton kernel's scratch memory."""
    return PROGRAMS + PROGRAM_LINES * (head_dim + 2)


def split_lines(group: int) -> int:
    """Return the maximum lines of a row that the CPU code splits, for `group` heads per KV head."""
    return max(SPLIT_LINES, group)


def query_tile(group: int, max_query_tokens: int) -> int:
    """Return the query tokens that the CPU code handles at once.

    Args:
        group: query heads per KV head.
        max_query_tokens: upper bound of a row's query tokens.
    """
    return min(max_query_tokens, max(1, LINES // group))
