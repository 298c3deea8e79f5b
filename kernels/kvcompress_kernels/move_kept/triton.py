"""Triton kernel of `move_kept`: one launch for all rows.

Row n fills ``counts[n]`` pages, so it copies ``counts[n] * block_size`` tokens.

Elements are copied as integers of their size: a float register could change the bits of a NaN, and
a copy of fp8 should not need fp8 support. Only the bytes in flight limit the speed. So a program
copies 8 KiB of K and 8 KiB of V of one head, with four 16-byte loads of each per thread, all issued
before the first store. Programs for the heads of one tile are adjacent in the grid, because every
page holds all heads of its tokens.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import DIMS, Build
from kvcompress_kernels.paged_triton import dense

TILE_BYTES = 8192
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# These arguments differ by prompt. Triton would specialise for integers that are 1 or multiples of
# 16, and for aligned pointers.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["s_sources", "s_kept_row", "s_kept_head", "s_destinations"],
    do_not_specialize_on_alignment=["sources", "kept", "counts", "destinations"],
)
def _move_kernel(  # type: ignore[no-untyped-def]
    from_keys,
    from_values,
    to_keys,
    to_values,
    sources,  # [N, >= pages of the prompt]
    kept,  # [N, Hkv, >= tokens] positions or None: token t is at position t
    counts,  # [N] pages to fill
    destinations,  # [N, >= counts[n]]
    s_from_key_page,
    s_from_key_head,
    s_from_key_slot,
    s_from_key_dim,
    s_from_value_page,
    s_from_value_head,
    s_from_value_slot,
    s_from_value_dim,
    s_to_key_page,
    s_to_key_head,
    s_to_key_slot,
    s_to_key_dim,
    s_to_value_page,
    s_to_value_head,
    s_to_value_slot,
    s_to_value_dim,
    s_sources,
    s_kept_row,
    s_kept_head,
    s_destinations,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy one tile of kept tokens of one row and KV head."""
    row = tl.program_id(1).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    start = tl.program_id(0) // HEADS * ROWS
    tokens = tl.load(counts + row) * BLOCK
    if start >= tokens:
        return
    token = start + tl.arange(0, ROWS)
    live = token < tokens

    if kept is None:
        position = token
    else:
        at = kept + row * s_kept_row + head * s_kept_head + token
        position = tl.load(at, mask=live, other=0).to(tl.int32)
    # Convert to int64 first: page * stride exceeds 2**31 in an ordinary cache.
    slot = (position % BLOCK).to(tl.int64)
    page = tl.load(sources + row * s_sources + position // BLOCK, mask=live, other=0).to(tl.int64)
    to_slot = (token % BLOCK).to(tl.int64)
    at = destinations + row * s_destinations + token // BLOCK
    to_page = tl.load(at, mask=live, other=0).to(tl.int64)

    key_dim = tl.arange(0, KEY_PAD)[None, :]
    value_dim = tl.arange(0, VALUE_PAD)[None, :]
    key_live = live[:, None] & (key_dim < KEY_DIM)
    value_live = live[:, None] & (value_dim < VALUE_DIM)
    from_key = page * s_from_key_page + head * s_from_key_head + slot * s_from_key_slot
    from_value = page * s_from_value_page + head * s_from_value_head + slot * s_from_value_slot
    key = tl.load(  # [ROWS, KEY_PAD]
        from_keys + from_key[:, None] + key_dim.to(tl.int64) * s_from_key_dim, mask=key_live
    )
    value = tl.load(
        from_values + from_value[:, None] + value_dim.to(tl.int64) * s_from_value_dim,
        mask=value_live,
    )
    to_key = to_page * s_to_key_page + head * s_to_key_head + to_slot * s_to_key_slot
    to_value = to_page * s_to_value_page + head * s_to_value_head + to_slot * s_to_value_slot
    tl.store(to_keys + to_key[:, None] + key_dim.to(tl.int64) * s_to_key_dim, key, mask=key_live)
    tl.store(
        to_values + to_value[:, None] + value_dim.to(tl.int64) * s_to_value_dim,
        value,
        mask=value_live,
    )


def run(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    kept: torch.Tensor | None,
    counts: torch.Tensor,
    destinations: torch.Tensor,
    to_keys: torch.Tensor,
    to_values: torch.Tensor,
) -> None:
    source, target = _Pages.of(key_pages, value_pages), _Pages.of(to_keys, to_values)
    _, heads, block, key_dim = source.keys.shape
    value_dim, (rows, max_pages) = source.values.shape[3], destinations.shape
    if rows * max_pages == 0:
        return
    pages, destinations = dense(pages), dense(destinations)
    kept = None if kept is None else dense(kept)
    config = _config(key_dim, value_dim, source.keys.element_size())
    grid = (triton.cdiv(max_pages * block, config["ROWS"]) * heads, rows)
    _move_kernel[grid](
        *source,
        *target,
        pages,
        kept,
        counts,
        destinations,
        *(step for tensor in (*source, *target) for step in tensor.stride()),
        pages.stride(0),
        *((0, 0) if kept is None else kept.stride()[:2]),
        destinations.stride(0),
        HEADS=heads,
        BLOCK=block,
        **config,
    )


class _Pages(NamedTuple):
    """Key and value pages as integers, both as ``[pages, Hkv, block_size, D]`` views."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> "_Pages":
        """Return the views of keys ``[pages, Hkv, D, block_size]`` and values as ops get them."""
        return cls(
            keys.view(INTEGERS[keys.element_size()]).transpose(2, 3),
            values.view(INTEGERS[values.element_size()]),
        )


def _config(key_dim: int, value_dim: int, size: int) -> dict[str, int]:
    """Return the configuration and launch options for two head dims and an element's bytes."""
    key_pad, value_pad = (triton.next_power_of_2(dim) for dim in (key_dim, value_dim))
    rows = TILE_BYTES // (max(key_pad, value_pad) * size)
    return {
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_PAD": key_pad,
        "VALUE_PAD": value_pad,
        "ROWS": min(max(rows, 1), 128),
        "num_warps": 4,
    }


def builds(sm: int) -> list[Build]:
    """Return builds for bf16, block 16 and 8 KV heads, which copy kept tokens or full pages."""
    sides = [f"{side}_{kind}" for side in ("from", "to") for kind in ("key", "value")]
    types = {f"{side}s": "*i16" for side in sides}
    types |= {"sources": "*i64", "kept": "*i32", "counts": "*i32", "destinations": "*i32"}
    fixed: dict[str, Any] = {"HEADS": 8, "BLOCK": 16} | {f"s_{side}_dim": 1 for side in sides}
    return [
        Build(
            name=f"move_kept {'pages' if kept else 'tokens'} D{dim}",
            kernel=_move_kernel,
            config=fixed | kept | _config(dim, dim, 2),
            types=types,
        )
        for dim in DIMS
        for kept in ({}, {"kept": None})
    ]
