"""Triton kernel of `gather_kept` and `scatter_kept`, and the move of a whole step in one launch.

All of them copy token rows ``[D]`` of K and V of one KV head from page slots to page slots; they
differ in which side is looked up and which is numbered:

    gather   kept positions of listed pages  -> packed pages 0, 1, ...
    scatter  packed pages 0, 1, ...          -> listed pages
    move     kept positions of listed pages  -> listed pages

so there is one kernel, whose tables may be None. Row n of a batch (a layer of a request: in the
page pool a layer is only other page ids) fills whole pages, ``counts[n]`` of them, so its tokens
are ``0 .. counts[n] * block_size`` in destination order.

Elements travel as integers of their size: a float register could quieten a NaN or lose a payload,
and fp8 needs no arithmetic support. Nothing is computed, so only bytes in flight matter: a program
takes 8 KiB of K and 8 KiB of V of one head, four 16-byte loads of each per thread, all issued
before the first store. Programs of one tile's heads are neighbours, because a page holds the
tokens of all heads, whatever its layout.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import Build
from kvcompress_kernels.ops import require

TILE_BYTES = 8192
WARPS = 4
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# The launcher compiles anew for integers that are 1 or multiples of 16; these differ by prompt.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["most", "s_sources", "s_kept_row", "s_kept_head", "s_destinations"]
)
def _move_kernel(  # type: ignore[no-untyped-def]
    from_keys,
    from_values,
    to_keys,
    to_values,
    sources,  # [N, >= pages of the prompt] or None: row n reads pages n * most, n * most + 1, ...
    kept,  # [N, Hkv, >= tokens] positions or None: token t is at position t
    counts,  # [N] pages to fill or None: `most` in every row
    destinations,  # [N, >= counts[n]] or None: row n fills pages n * most, n * most + 1, ...
    most,
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
    row = tl.program_id(1).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    start = tl.program_id(0) // HEADS * ROWS
    tokens = most * BLOCK
    if counts is not None:
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
    # int64 before multiplying: page * stride passes 2**31 in an ordinary cache
    slot = (position % BLOCK).to(tl.int64)
    if sources is None:
        page = row * most + position // BLOCK
    else:
        at = sources + row * s_sources + position // BLOCK
        page = tl.load(at, mask=live, other=0).to(tl.int64)
    to_slot = (token % BLOCK).to(tl.int64)
    if destinations is None:
        to_page = row * most + token // BLOCK
    else:
        at = destinations + row * s_destinations + token // BLOCK
        to_page = tl.load(at, mask=live, other=0).to(tl.int64)

    key_dim = tl.arange(0, KEY_PAD)[None, :]
    value_dim = tl.arange(0, VALUE_PAD)[None, :]
    key_live = live[:, None] & (key_dim < KEY_DIM)
    value_live = live[:, None] & (value_dim < VALUE_DIM)
    from_key = page * s_from_key_page + head * s_from_key_head + slot * s_from_key_slot
    from_value = page * s_from_value_page + head * s_from_value_head + slot * s_from_value_slot
    key = tl.load(  # [ROWS, KEY_PAD]
        from_keys + from_key[:, None] + key_dim * s_from_key_dim, mask=key_live
    )
    value = tl.load(
        from_values + from_value[:, None] + value_dim * s_from_value_dim, mask=value_live
    )
    to_key = to_page * s_to_key_page + head * s_to_key_head + to_slot * s_to_key_slot
    to_value = to_page * s_to_value_page + head * s_to_value_head + to_slot * s_to_value_slot
    tl.store(to_keys + to_key[:, None] + key_dim * s_to_key_dim, key, mask=key_live)
    tl.store(to_values + to_value[:, None] + value_dim * s_to_value_dim, value, mask=value_live)


def gather(
    key_pages: torch.Tensor, value_pages: torch.Tensor, pages: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    most = kept.shape[1] // key_pages.shape[3]
    return _gather(key_pages, value_pages, pages[None], kept[None], None, most)


def scatter(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    destination: torch.Tensor,
) -> None:
    _scatter(key_pages, value_pages, keys, values, None, destination[None])


def move_batch(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    source_pages: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
    destination_pages: torch.Tensor,
) -> None:
    """Move the kept rows of every layer and request of a step into other pages: one launch.

    Args:
        key_pages: ``[pages, Hkv, D, block_size]``, any dtype and strides.
        value_pages: ``[pages, Hkv, block_size, Dv]`` likewise.
        source_pages: ``[N, W]`` int: the pages of each row's prompt, in order.
        kept: ``[N, Hkv, n_max]`` int: kept positions, ascending; the first
            ``counts[n] * block_size`` of row n are read.
        counts: ``[N]`` int32 on the device: pages that row n fills, each of them wholly; at most
            ``p_max`` and ``n_max // block_size`` (unchecked: checking would sync).
        destination_pages: ``[N, p_max]`` int: the first ``counts[n]`` of row n are written. None
            may be a source of any row: rows run in no order. Where they overlap, use
            `gather_batch` and `scatter_batch`.

    Raises:
        ValueError: shapes disagree.
    """
    name = "move_batch"
    _check_batch(name, key_pages, source_pages, kept, counts)
    rows = len(counts)
    require(len(destination_pages) == rows, name, f"{rows} rows", tuple(destination_pages.shape))
    pages = _Pages.of(key_pages, value_pages)
    most = destination_pages.shape[1]
    _launch(pages, pages, source_pages, kept, counts, destination_pages, rows, most)


def gather_batch(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    source_pages: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_kept` of every row (see `move_batch`): one launch.

    Returns:
        Keys ``[N, p_max, Hkv, D, block_size]`` and values ``[N, p_max, Hkv, block_size, Dv]``
        with ``p_max = n_max // block_size``; uninitialised from page ``counts[n]`` on.
    """
    _check_batch("gather_batch", key_pages, source_pages, kept, counts)
    rows, most = len(counts), kept.shape[2] // key_pages.shape[3]
    keys, values = _gather(key_pages, value_pages, source_pages, kept, counts, most)
    return keys.view(rows, most, *keys.shape[1:]), values.view(rows, most, *values.shape[1:])


def scatter_batch(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
    destination_pages: torch.Tensor,
) -> None:
    """Write what `gather_batch` packed to `destination_pages` ``[N, p_max]``: one launch."""
    require(
        len(counts) == len(keys) and destination_pages.shape == keys.shape[:2] == values.shape[:2],
        "scatter_batch",
        f"destination_pages must be {list(keys.shape[:2])}",
        tuple(destination_pages.shape),
    )
    flat = keys.flatten(0, 1), values.flatten(0, 1)
    _scatter(key_pages, value_pages, *flat, counts, destination_pages)


class _Pages(NamedTuple):
    """Pages as integers, both ``[pages, Hkv, block_size, D]`` views."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> "_Pages":
        """Of the views every op gets: keys come as ``[pages, Hkv, D, block_size]``."""
        return cls(
            keys.view(INTEGERS[keys.element_size()]).transpose(2, 3),
            values.view(INTEGERS[values.element_size()]),
        )


def _gather(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    sources: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor | None,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, (_, heads, dim, block) = len(kept), key_pages.shape
    packed = rows * most, heads, block
    # token rows are contiguous whatever the cache does: the packed side always moves 16 bytes
    keys = key_pages.new_empty(*packed, dim).transpose(2, 3)
    values = value_pages.new_empty(*packed, value_pages.shape[3])
    source, target = _Pages.of(key_pages, value_pages), _Pages.of(keys, values)
    _launch(source, target, sources, kept, counts, None, rows, most)
    return keys, values


def _scatter(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor | None,
    destinations: torch.Tensor,
) -> None:
    for packed, cache in ((keys, key_pages), (values, value_pages)):
        got, want = (packed.dtype, *packed.shape[1:]), (cache.dtype, *cache.shape[1:])
        require(got == want, "scatter", f"packed pages must be like the cache's, {want}", got)
    source, target = _Pages.of(keys, values), _Pages.of(key_pages, value_pages)
    rows, most = destinations.shape
    _launch(source, target, None, None, counts, destinations, rows, most)


def _check_batch(
    name: str,
    key_pages: torch.Tensor,
    source_pages: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    rows, heads = len(counts), key_pages.shape[1]
    require(kept.shape[:2] == (rows, heads), name, f"kept [{rows}, {heads}, n]", tuple(kept.shape))
    require(len(source_pages) == rows, name, f"{rows} rows of pages", tuple(source_pages.shape))


def _launch(
    source: _Pages,
    target: _Pages,
    sources: torch.Tensor | None,
    kept: torch.Tensor | None,
    counts: torch.Tensor | None,
    destinations: torch.Tensor | None,
    rows: int,
    most: int,
) -> None:
    _, heads, block, key_dim = source.keys.shape
    value_dim = source.values.shape[3]
    if rows * most == 0:
        return
    sources, kept, destinations = _dense(sources), _dense(kept), _dense(destinations)
    shapes = _shapes(key_dim, value_dim, source.keys.element_size())
    grid = (triton.cdiv(most * block, shapes["ROWS"]) * heads, rows)
    _move_kernel[grid](
        *source,
        *target,
        sources,
        kept,
        counts,
        destinations,
        most,
        *(step for tensor in (*source, *target) for step in tensor.stride()),
        0 if sources is None else sources.stride(0),
        *((0, 0) if kept is None else kept.stride()[:2]),
        0 if destinations is None else destinations.stride(0),
        HEADS=heads,
        BLOCK=block,
        **shapes,
        num_warps=WARPS,
    )


def _dense(table: torch.Tensor | None) -> torch.Tensor | None:
    return table if table is None or table.stride(-1) == 1 else table.contiguous()


def _shapes(key_dim: int, value_dim: int, size: int) -> dict[str, int]:
    """The configuration of a program, from the head dims and the bytes of an element."""
    key_pad, value_pad = (triton.next_power_of_2(dim) for dim in (key_dim, value_dim))
    rows = TILE_BYTES // (max(key_pad, value_pad) * size)
    return {
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_PAD": key_pad,
        "VALUE_PAD": value_pad,
        "ROWS": min(max(rows, 1), 128),
    }


def builds() -> list[Build]:
    """bf16, block 16, 8 KV heads: gather, scatter and move, K and V of a token side by side."""
    return [
        _build(name, dim, tables)
        for dim in (64, 128)
        for name, tables in {
            "gather": {"sources": "*i64", "kept": "*i64"},
            "scatter": {"destinations": "*i64"},
            "move": {
                "sources": "*i64",
                "kept": "*i32",
                "counts": "*i32",
                "destinations": "*i64",
            },
        }.items()
    ]


def _build(name: str, dim: int, tables: dict[str, str]) -> Build:
    sides = [f"{side}_{kind}" for side in ("from", "to") for kind in ("key", "value")]
    pages = {f"{side}s": "*i16" for side in sides}
    strides = {f"s_{side}_{axis}": "i32" for side in sides for axis in ("page", "head", "slot")}
    steps = ("most", "s_sources", "s_kept_row", "s_kept_head", "s_destinations")
    absent = {"sources", "kept", "counts", "destinations"} - set(tables)
    constexprs: dict[str, Any] = dict.fromkeys(absent)
    constexprs |= {f"s_{side}_dim": 1 for side in sides}
    return Build(
        name=f"compact {name} D{dim}",
        kernel=_move_kernel,
        signature=pages | tables | strides | dict.fromkeys(steps, "i32"),
        constexprs=constexprs | {"HEADS": 8, "BLOCK": 16} | _shapes(dim, dim, 2),
        warps=WARPS,
        aligned=(*pages, *tables, *strides),
    )
