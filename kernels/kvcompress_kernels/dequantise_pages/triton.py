"""Triton kernel of `dequantise_pages`: one launch, with one program per group and KV head.

A byte of a packed page holds channels that are D/2, D/4 or D/8 apart. So the keys are stored as two
tiles of D/2 channels and the values as eight tiles of D/8 channels.
"""

import torch
import triton
import triton.language as tl

from kvcompress_kernels import k4v3
from kvcompress_kernels.builds import DIMS, Build
from kvcompress_kernels.packed_attention.offsets import Offsets
from kvcompress_kernels.paged_triton import in_row

GROUP = tl.constexpr(k4v3.GROUP)
FLOAT16_MAX = tl.constexpr(k4v3.FLOAT16_MAX)


@triton.jit
def _stored(x, like):  # type: ignore[no-untyped-def]
    """Return float32 numbers in the dtype that `like` points to. float16 saturates."""
    if like.dtype.element_ty == tl.float16:
        x = tl.minimum(tl.maximum(x, -FLOAT16_MAX), FLOAT16_MAX)
    return x.to(like.dtype.element_ty)


# A layer's packed pages are a row of a table, which may start at any multiple of 4 bytes.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["packed", "destinations"],
)
def _dequantise_kernel(  # type: ignore[no-untyped-def]
    elements,  # [N, Hkv, BLOCK, 2 * D]
    content,  # the same memory as bytes
    halves,  # the same memory as float16
    packed,  # [n]
    destinations,  # [n * page_tokens / BLOCK]
    s_page,
    s_head,
    s_row,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # padded D/2
    EIGHTH: tl.constexpr,  # padded D/8
):
    """Dequantise one group of one KV head."""
    ROW: tl.constexpr = 2 * DIM * ITEMSIZE
    GROUP_ROWS: tl.constexpr = 32 // ITEMSIZE
    PAGE_GROUPS: tl.constexpr = BLOCK // GROUP_ROWS
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    group = tl.program_id(0) // HEADS
    # Convert to int64 first: page * stride exceeds 2**31 in an ordinary cache.
    page = tl.load(packed + group // PAGE_GROUPS).to(tl.int64)
    first_row = (group % PAGE_GROUPS * GROUP_ROWS).to(tl.int64)
    at = (page * s_page + head * s_head + first_row * s_row) * ITEMSIZE
    content += at
    halves += at // 2
    s_bytes = s_row * ITEMSIZE

    number = tl.arange(0, GROUP)
    token = group * GROUP + number
    to_page = tl.load(destinations + token // BLOCK).to(tl.int64)
    slot = (token % BLOCK).to(tl.int64)
    rows = elements + to_page * s_page + head * s_head + slot * s_row

    dim = tl.arange(0, HALF)
    real = dim < DIM // 2
    byte = in_row(number * (DIM // 2), s_bytes, ROW)[:, None] + dim[None, :]
    code = tl.load(content + byte, mask=real[None, :], other=0).to(tl.int32)
    for part in tl.static_range(2):
        half = 28 * DIM + part * (DIM // 2) + dim
        place = halves + in_row(half, s_bytes // 2, ROW // 2)
        scale = tl.load(place, mask=real, other=0.0).to(tl.float32)
        place = halves + in_row(half + DIM, s_bytes // 2, ROW // 2)
        minimum = tl.load(place, mask=real, other=0.0).to(tl.float32)
        x = minimum[None, :] + scale[None, :] * ((code >> 4 * part) & 15).to(tl.float32)
        to = rows[:, None] + (part * (DIM // 2) + dim)[None, :]
        tl.store(to, _stored(x, elements), mask=real[None, :])

    channel = tl.arange(0, EIGHTH)
    known = (channel < DIM // 8)[None, :]
    place = halves + in_row(30 * DIM + number, s_bytes // 2, ROW // 2)
    scale = tl.load(place).to(tl.float32)[:, None]
    place = halves + in_row(30 * DIM + GROUP + number, s_bytes // 2, ROW // 2)
    minimum = tl.load(place).to(tl.float32)[:, None]
    byte = in_row(32 * DIM + number * (DIM // 4), s_bytes, ROW)[:, None] + channel[None, :]
    even = tl.load(content + byte, mask=known, other=0).to(tl.int32)
    odd = tl.load(content + byte + DIM // 8, mask=known, other=0).to(tl.int32)
    byte = in_row(48 * DIM + number * (DIM // 8), s_bytes, ROW)[:, None] + channel[None, :]
    high = tl.load(content + byte, mask=known, other=0).to(tl.int32)
    for part in tl.static_range(8):
        low = even if part % 2 == 0 else odd
        code = (low >> part // 2 * 2) & 3 | ((high >> part) & 1) << 2
        x = minimum + scale * code.to(tl.float32)
        to = rows[:, None] + (DIM + part * (DIM // 8) + channel)[None, :]
        tl.store(to, _stored(x, elements), mask=known)


def run(
    pages: torch.Tensor,
    offsets: Offsets | None,
    packed: torch.Tensor,
    destinations: torch.Tensor,
) -> None:
    _, heads, block, width = pages.shape
    groups = len(packed) * k4v3.page_tokens(block, pages.itemsize) // k4v3.GROUP
    if groups == 0:
        return
    _dequantise_kernel[(groups * heads,)](
        pages,
        pages.view(torch.uint8),
        pages.view(torch.float16),
        packed,
        destinations,
        *pages.stride()[:3],
        HEADS=heads,
        BLOCK=block,
        ITEMSIZE=pages.itemsize,
        **_config(width // 2),
    )


def _config(dim: int) -> dict[str, int]:
    """Return the configuration and launch options for a head dim."""
    return {
        "DIM": dim,
        "HALF": triton.next_power_of_2(dim // 2),
        "EIGHTH": triton.next_power_of_2(dim // 8),
        "num_warps": 4,
    }


def builds(sm: int) -> list[Build]:
    """Return builds for 8 KV heads and blocks of two groups: bf16, and float32 for one head dim."""
    types = {"content": "*u8", "halves": "*fp16", "packed": "*i32", "destinations": "*i32"}
    return [
        Build(
            name=f"dequantise_pages D{dim}{name}",
            kernel=_dequantise_kernel,
            config={"HEADS": 8, "BLOCK": 64 // itemsize, "ITEMSIZE": itemsize, **_config(dim)},
            types={**types, "elements": kind},
            wide_loads=dim % 32 == 0,
        )
        for dim, name, kind, itemsize in (
            *((dim, "", "*bf16", 2) for dim in DIMS),
            (128, " float32", "*fp32", 4),
        )
    ]
