"""Attention over packed groups (`k4v3`) and ordinary pages, for the rows with packed tokens."""

from typing import Any

import torch

from kvcompress_kernels import contract, k4v3
from kvcompress_kernels.contract import check_floats, check_tensor, require
from kvcompress_kernels.packed_attention.offsets import Offsets, check_offsets
from kvcompress_kernels.packed_attention.scratch import workspace

__all__ = ["LayerAttention", "Offsets", "packed_attention", "workspace"]

_NAME = "packed_attention"
_FLOATS = torch.bfloat16, torch.float16, torch.float32


def packed_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    pages: torch.Tensor,
    offsets: Offsets | None,
    packed: torch.Tensor,
    packed_tokens: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_start: torch.Tensor,
    slots: torch.Tensor,
    live: torch.Tensor,
    *,
    scale: float,
    max_query_tokens: int,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Write the attention output of every row that has packed tokens.

    Row r is a request of the batch, with slot ``s = slots[r]`` and q query tokens. Its query i
    attends to all ``packed_tokens[s]`` packed tokens and to the ordinary tokens
    ``t <= lengths[r] - q + i``. The op leaves the output of rows without packed tokens unchanged.
    On a GPU this is one launch without a copy or sync, and with `workspace` without an allocation.

    Args:
        query: ``[T, Hq, D]``, bfloat16, float16 or float32. Token and head strides are arbitrary.
        output: ``[T, Hq, D]``, one of the same dtypes. Written in place.
        pages: ``[N, Hkv, block_size, 2 * D]`` in the cache's dtype. Only the last axis must be
            contiguous. A packed page holds ``block_size * itemsize / 32`` groups of 64 tokens per
            head; `k4v3` defines their bytes.
        offsets: where an ordinary page stores K and V of a head. None if a token's row is its K,
            then its V. Other layouts need a CPU and pages with a contiguous part per head.
        packed: ``[S, C]`` int32: the packed pages of each slot, in order.
        packed_tokens: ``[S]`` int32: the packed tokens of each slot. All groups except the last
            are full.
        tables: ``[R, W]`` int32: the ordinary pages of each row.
        lengths: ``[R]`` int32: ordinary tokens of each row, including its query tokens.
        query_start: ``[>= R + 1]`` int32: first query token of each row.
        slots: ``[>= R]`` int32: slot of each row.
        live: ``[]`` int32: rows of this step, at most R.
        scale: factor on all logits, positive on a GPU.
        max_query_tokens: upper bound of a row's query tokens, 1 in a decode step.
        key_scale, value_scale: factors on the stored K and V of ordinary pages (float8 caches).
        sinks: ``[Hq]`` float32: an extra logit of each head's softmax without a value.
        workspace: scratch memory from `workspace`. Allocated here if None.

    Raises:
        ValueError: Shapes, dtypes or strides disagree.
        ImportError: The op runs on a CPU without numba.
    """
    triton = contract.runs_triton(query)
    require(not triton or offsets is None, _NAME, "on a GPU offsets must be None", offsets)
    require(query.dim() == 3, _NAME, "query must be [T, Hq, D]", tuple(query.shape))
    (heads, dim), (_, kv_heads, block, width) = query.shape[1:], pages.shape
    for name, x in (("query", query), ("output", output)):
        require(x.dtype in _FLOATS, _NAME, f"{name} must be one of {list(_FLOATS)}", x.dtype)
        require(x.stride(2) == 1, _NAME, f"{name} must have a dense last axis", x.stride())
    rule = f"output must be {list(query.shape)}"
    require(output.shape == query.shape, _NAME, rule, tuple(output.shape))
    check_floats(_NAME, "pages", pages)
    rule = f"pages must be [N, Hkv, block_size, {2 * dim}] with a dense last axis"
    require(width == 2 * dim and pages.stride(3) == 1, _NAME, rule, tuple(pages.shape))
    require(heads % kv_heads == 0, _NAME, f"Hq must be a multiple of Hkv={kv_heads}", heads)
    refusal = k4v3.refusal(dim, block, pages.itemsize)
    require(not refusal, _NAME, refusal, (dim, block, pages.dtype))
    rows = len(lengths)
    integers = {
        "packed": (packed, (len(packed_tokens), packed.shape[-1])),
        "packed_tokens": (packed_tokens, (len(packed_tokens),)),
        "tables": (tables, (rows, tables.shape[-1])),
        "lengths": (lengths, (rows,)),
        "live": (live, ()),
    }
    for name, (x, shape) in integers.items():
        check_tensor(_NAME, name, x, shape, torch.int32)
    for name, x in (("packed", packed), ("tables", tables), ("lengths", lengths)):
        ok = x.shape[-1] <= 1 or x.stride(-1) == 1
        require(ok, _NAME, f"{name} must have a dense last axis", x.stride())
    for name, x, size in (("query_start", query_start, rows + 1), ("slots", slots, rows)):
        ok = x.dtype == torch.int32 and x.dim() == 1 and len(x) >= size
        got = x.dtype, tuple(x.shape)
        require(ok, _NAME, f"{name} must be int32 with at least {size} elements", got)
    if sinks is not None:
        check_tensor(_NAME, "sinks", sinks, (heads,), torch.float32)
    if offsets is not None:
        check_offsets(_NAME, offsets, pages)
    require(max_query_tokens > 0, _NAME, "max_query_tokens must be positive", max_query_tokens)
    attend = LayerAttention(
        pages,
        offsets,
        packed,
        packed_tokens,
        slots,
        live,
        query_heads=query.shape[1],
        scale=scale,
        key_scale=key_scale,
        value_scale=value_scale,
        sinks=sinks,
        workspace=workspace,
    )
    attend(query, output, tables, lengths, query_start, max_query_tokens)


class LayerAttention:
    """`packed_attention` of one layer, with the arguments that its steps have in common.

    Calls check no argument, because a decode step calls it once per layer. The arguments are those
    of `packed_attention`; their addresses and strides must not change between calls.
    """

    def __init__(
        self,
        pages: torch.Tensor,
        offsets: Offsets | None,
        packed: torch.Tensor,
        packed_tokens: torch.Tensor,
        slots: torch.Tensor,
        live: torch.Tensor,
        *,
        query_heads: int,
        scale: float,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        self._cache, self._groups = (pages, offsets, packed, packed_tokens), (slots, live)
        self._options: dict[str, Any] = {
            "scale": scale,
            "key_scale": key_scale,
            "value_scale": value_scale,
            "sinks": sinks,
            "scratch": workspace,
        }
        self._cpu: Any = None
        if not contract.runs_triton(pages):
            from kvcompress_kernels.packed_attention.cpu import LayerCall

            arguments = *self._cache, *self._groups, query_heads
            self._cpu = LayerCall(*arguments, **self._options)

    def __call__(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        query_start: torch.Tensor,
        max_query_tokens: int,
    ) -> None:
        """Write the attention output of every row that has packed tokens."""
        if self._cpu is not None:
            self._cpu(query, output, tables, lengths, query_start, max_query_tokens)
            return
        from kvcompress_kernels.packed_attention.triton import run

        arguments = query, output, *self._cache, tables, lengths, query_start, *self._groups
        run(*arguments, max_query_tokens=max_query_tokens, **self._options)
