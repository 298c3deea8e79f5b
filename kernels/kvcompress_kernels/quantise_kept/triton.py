"""Triton kernel of `quantise_kept`: one launch, with one program per row, KV head and group.

A program loads all keys and values of its group before it computes. Bytes of a packed page combine
channels that are D/2, D/4 or D/8 apart. So the keys are loaded as two tiles of D/2 channels and the
values as eight tiles of D/8 channels, and a thread holds all numbers of the bytes that it writes.
Programs for the heads of one group are adjacent in the grid, because every page holds all heads of
its tokens.
"""

import torch
import triton
import triton.language as tl

from kvcompress_kernels import k4v3
from kvcompress_kernels.builds import DIMS, Build, check_cache, float8, float8_suffix
from kvcompress_kernels.paged_triton import dense

GROUP = tl.constexpr(k4v3.GROUP)
KEY_LEVELS, VALUE_LEVELS = tl.constexpr(k4v3.KEY_LEVELS), tl.constexpr(k4v3.VALUE_LEVELS)
FLOAT16_MAX = tl.constexpr(k4v3.FLOAT16_MAX)
ROUND = tl.constexpr(1.5 * 2**23)


@triton.jit  # type: ignore[untyped-decorator]
def _steps(lowest, largest, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return scale and minimum, float16; both 0 where `lowest` and `largest` are NaN."""
    lowest = tl.where(lowest == lowest, lowest, 0.0)
    minimum = tl.minimum(tl.maximum(lowest, -FLOAT16_MAX), FLOAT16_MAX).to(tl.float16)
    spread = tl.maximum(largest - minimum.to(tl.float32), 0.0)
    return tl.minimum(spread / (LEVELS - 1), FLOAT16_MAX).to(tl.float16), minimum


@triton.jit
def _scaled(x, factor, live):  # type: ignore[no-untyped-def]
    """Return `x` times `factor` in float32, and NaN outside `live`.

    `tl.min`, `tl.max`, `tl.minimum` and `tl.maximum` return the other operand of a NaN.
    """
    return tl.where(live, x.to(tl.float32) * factor, float("nan"))


@triton.jit
def _inverse(scale):  # type: ignore[no-untyped-def]
    """Return 1 / scale. Where it is 0, no number exceeds the minimum by half a step of 1."""
    return 1.0 / tl.where(scale > 0, scale.to(tl.float32), 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _codes(x, minimum, inverse, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the int32 codes of `x`, 0 for NaN.

    Adding ROUND rounds to an integer in the low bits of a float32. A GPU converts floats to
    integers at a quarter of the rate.
    """
    code = (x - minimum.to(tl.float32)) * inverse + ROUND
    code = tl.minimum(tl.maximum(code, ROUND), ROUND + (LEVELS - 1))
    return code.to(tl.int32, bitcast=True) & (LEVELS - 1)


@triton.jit
def _key_codes(x):  # type: ignore[no-untyped-def]
    """Return the codes ``[64, channels]`` of keys, and the channels' scales and minima."""
    scale, minimum = _steps(tl.min(x, 0), tl.max(x, 0), KEY_LEVELS)
    return _codes(x, minimum[None, :], _inverse(scale)[None, :], KEY_LEVELS), scale, minimum


@triton.jit  # type: ignore[untyped-decorator]
def _store(start, byte, x, live, s_row, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store `x` at bytes of the group that starts at `start`, in rows of WIDTH bytes."""
    at = start + (byte // WIDTH).to(tl.int64) * s_row + byte % WIDTH
    tl.store(at.to(tl.pointer_type(x.dtype)), x, mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def _store_tokens(  # type: ignore[no-untyped-def]
    start, x, live, s_row, WIDTH: tl.constexpr, FROM: tl.constexpr, BYTES: tl.constexpr,
    OFFSET: tl.constexpr = 0,
):  # fmt: skip
    """Store ``[64, n]`` codes in a part of the group that has BYTES bytes per token.

    Tokens per row are a power of two for every D, so no vector crosses a row.

    Args:
        FROM: first byte of the part.
        OFFSET: first byte of a token that is written.
    """
    PER_ROW: tl.constexpr = WIDTH // BYTES
    token = tl.arange(0, GROUP)
    row = start + (FROM // WIDTH + token // PER_ROW).to(tl.int64) * s_row
    byte = token % PER_ROW * BYTES
    at = row[:, None] + byte[:, None] + OFFSET + tl.arange(0, x.shape[1])[None, :]
    tl.store(at, x.to(tl.uint8), mask=live)


# These arguments differ by prompt. Triton would specialise for integers that are 1 or multiples of
# 16, and for aligned pointers.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["s_sources", "s_kept_row", "s_kept_head", "s_destinations"],
    do_not_specialize_on_alignment=[
        *("sources", "kept", "tokens", "destinations", "key_scale", "value_scale"),
    ],
)
def _quantise_kernel(  # type: ignore[no-untyped-def]
    keys,
    values,
    into,  # bytes
    sources,  # [N, >= pages of the prompt]
    kept,  # [N, Hkv, >= tokens] positions or None: token t is at position t
    tokens,  # [N] tokens to quantise
    destinations,  # [N, >= pages that the tokens need]
    key_scale,  # a number, or [N] if KEY_SCALES
    value_scale,  # a number, or [N] if VALUE_SCALES
    s_key_page,
    s_key_head,
    s_key_dim,
    s_key_slot,
    s_value_page,
    s_value_head,
    s_value_slot,
    s_value_dim,
    s_page,
    s_head,
    s_row,
    s_sources,
    s_kept_row,
    s_kept_head,
    s_destinations,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # padded D/2
    EIGHTH: tl.constexpr,  # padded D/8
    WIDTH: tl.constexpr,  # bytes per row of `into`
    PAGE_GROUPS: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
):
    """Quantise one group of one row and KV head."""
    row = tl.program_id(1).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    group = tl.program_id(0) // HEADS
    count = tl.load(tokens + row)
    token = group * GROUP + tl.arange(0, GROUP)
    if group * GROUP >= count:
        return
    live = token < count
    key_factor = tl.load(key_scale + row) if KEY_SCALES else key_scale
    value_factor = tl.load(value_scale + row) if VALUE_SCALES else value_scale

    if kept is None:
        position = token
    else:
        at = kept + row * s_kept_row + head * s_kept_head + token
        position = tl.load(at, mask=live, other=0).to(tl.int32)
    # Convert to int64 first: page * stride exceeds 2**31 in an ordinary cache.
    slot = (position % BLOCK).to(tl.int64)
    page = tl.load(sources + row * s_sources + position // BLOCK, mask=live, other=0).to(tl.int64)
    to_page = tl.load(destinations + row * s_destinations + group // PAGE_GROUPS).to(tl.int64)
    GROUP_ROWS: tl.constexpr = GROUP * DIM // WIDTH
    first_row = (group % PAGE_GROUPS * GROUP_ROWS).to(tl.int64)
    start = into + to_page * s_page + head * s_head + first_row * s_row

    half, eighth = tl.arange(0, HALF), tl.arange(0, EIGHTH)
    half_live, eighth_live = half < DIM // 2, eighth < DIM // 8
    keys_live = live[:, None] & half_live[None, :]
    values_live = live[:, None] & eighth_live[None, :]
    from_key = keys + (page * s_key_page + head * s_key_head + slot * s_key_slot)[:, None]
    from_value = page * s_value_page + head * s_value_head + slot * s_value_slot
    from_value = values + from_value[:, None]
    key_low = tl.load(
        from_key + half[None, :].to(tl.int64) * s_key_dim, mask=keys_live, other=0.0
    )  # [64, HALF]
    key_high = tl.load(
        from_key + (half + DIM // 2)[None, :].to(tl.int64) * s_key_dim, mask=keys_live, other=0.0
    )
    parts = ()
    for c in tl.static_range(8):
        at = from_value + (c * (DIM // 8) + eighth)[None, :].to(tl.int64) * s_value_dim
        x = tl.load(at, mask=values_live, other=0.0)  # [64, EIGHTH]
        parts = parts + (x,)  # type: ignore[assignment]  # noqa: RUF005

    low, low_scale, low_minimum = _key_codes(_scaled(key_low, key_factor, keys_live))
    high, high_scale, high_minimum = _key_codes(_scaled(key_high, key_factor, keys_live))
    _store_tokens(start, low | high << 4, half_live[None, :], s_row, WIDTH, 0, DIM // 2)
    _store(start, 56 * DIM + 2 * half, low_scale, half_live, s_row, WIDTH)
    _store(start, 57 * DIM + 2 * half, high_scale, half_live, s_row, WIDTH)
    _store(start, 58 * DIM + 2 * half, low_minimum, half_live, s_row, WIDTH)
    _store(start, 59 * DIM + 2 * half, high_minimum, half_live, s_row, WIDTH)

    lowest = _scaled(parts[0], value_factor, values_live)  # type: ignore[misc]
    largest = lowest
    for c in tl.static_range(1, 8):
        x = _scaled(parts[c], value_factor, values_live)
        lowest, largest = tl.minimum(lowest, x), tl.maximum(largest, x)
    scale, minimum = _steps(tl.min(lowest, 1), tl.max(largest, 1), VALUE_LEVELS)
    inverse = _inverse(scale)[:, None]
    even = tl.zeros([GROUP, EIGHTH], tl.int32)
    odd, top = even, even
    for c in tl.static_range(8):
        x = _scaled(parts[c], value_factor, values_live)
        code = _codes(x, minimum[:, None], inverse, VALUE_LEVELS)
        if c % 2 == 0:
            even |= (code & 3) << c
        else:
            odd |= (code & 3) << c - 1
        top |= (code >> 2) << c
    written = eighth_live[None, :]
    _store_tokens(start, even, written, s_row, WIDTH, 32 * DIM, DIM // 4)
    _store_tokens(start, odd, written, s_row, WIDTH, 32 * DIM, DIM // 4, DIM // 8)
    _store_tokens(start, top, written, s_row, WIDTH, 48 * DIM, DIM // 8)
    byte = 60 * DIM + 2 * tl.arange(0, GROUP)
    _store(start, byte, scale, None, s_row, WIDTH)
    _store(start, byte + 2 * GROUP, minimum, None, s_row, WIDTH)


def run(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    kept: torch.Tensor | None,
    tokens: torch.Tensor,
    destinations: torch.Tensor,
    into: torch.Tensor,
    key_scale: float | torch.Tensor,
    value_scale: float | torch.Tensor,
) -> None:
    check_cache("quantise_kept", key_pages)
    _, heads, dim, block = key_pages.shape
    config = _config(dim, into.shape[3], into.shape[2], key_pages.element_size())
    max_tokens = block * pages.shape[1] if kept is None else kept.shape[2]
    groups = min(destinations.shape[1] * config["PAGE_GROUPS"], -(-max_tokens // k4v3.GROUP))
    if len(pages) * groups == 0:
        return
    pages, destinations = dense(pages), dense(destinations)
    kept = None if kept is None else dense(kept)
    _quantise_kernel[groups * heads, len(pages)](
        key_pages,
        value_pages,
        into,
        pages,
        kept,
        tokens.contiguous(),
        destinations,
        *(x.contiguous() if isinstance(x, torch.Tensor) else x for x in (key_scale, value_scale)),
        *key_pages.stride(),
        *value_pages.stride(),
        *into.stride()[:3],
        pages.stride(0),
        *((0, 0) if kept is None else kept.stride()[:2]),
        destinations.stride(0),
        HEADS=heads,
        BLOCK=block,
        KEY_SCALES=isinstance(key_scale, torch.Tensor),
        VALUE_SCALES=isinstance(value_scale, torch.Tensor),
        **config,
    )


def _config(dim: int, width: int, rows: int, itemsize: int) -> dict[str, int]:
    """Return the configuration and launch options.

    With two bytes per number, a thread holds 64 keys and 64 values and loads 16 bytes of each tile
    of values. With four bytes it holds 32 of each.

    Args:
        dim: head dim.
        width: bytes of a row of a packed page.
        rows: rows of a packed page.
        itemsize: bytes of a source number.
    """
    pad: int = triton.next_power_of_2(dim)
    return {
        "DIM": dim,
        "HALF": triton.next_power_of_2(dim // 2),
        "EIGHTH": triton.next_power_of_2(dim // 8),
        "WIDTH": width,
        "PAGE_GROUPS": rows // k4v3.rows_per_group(width // (2 * dim)),
        "num_warps": max(pad // 32, 1) * (2 if itemsize > 2 else 1),
    }


def builds(sm: int) -> list[Build]:
    """Return builds for block 32 and 8 KV heads: bf16, and float8 and float32 for one head dim."""
    sizes = [*((128, kind, 1) for kind in float8(sm).values()), (128, "*fp32", 4)]
    sizes += [(dim, "*bf16", 2) for dim in DIMS]
    types = dict(into="*u8", sources="*i64", kept="*i32", tokens="*i32", destinations="*i32")
    types |= dict(key_scale="fp32", value_scale="fp32")
    fixed = dict(s_key_dim=1, s_value_dim=1, HEADS=8, BLOCK=32)
    fixed |= dict(KEY_SCALES=False, VALUE_SCALES=False)
    return [
        Build(
            name=f"quantise_kept D{dim}{float8_suffix(kind)}",
            kernel=_quantise_kernel,
            config=fixed | _config(dim, 2 * dim * itemsize, 32, itemsize),
            types=dict(types, keys=kind, values=kind),
        )
        for dim, kind, itemsize in sizes
    ]
