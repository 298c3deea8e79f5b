"""Triton kernels of the `apportion` ops: one program per row of layers.

The CPU code sorts the layers three times. These kernels compare all pairs of layers instead, one
tile at a time, so one program ranks them without a sort. They use the CPU code's operations in
float64 and int64. Only the summation order of the unfilled layers' weights differs.

Lanes from `n` on are padding. They have weight, cap and floor 0, and come last in every order.
"""

import struct
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import Build

TOLERANCE = tl.constexpr(1e-9)
"""A share this close below an integer counts as that integer."""
REMAINDER_SCALE = tl.constexpr(1e9)
"""Remainders are compared at this resolution, so that float64 noise does not break ties."""
TO_EVEN = tl.constexpr(1.5 * 2.0**52)
"""Adding and subtracting this rounds a float64 to the nearest integer, ties to even."""
LARGEST = tl.constexpr(2**63 - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(values, start, N: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `TILE` of N values, as a row."""
    if TILE == N:
        return values[None, :]
    else:
        return tl.gather(values, start + tl.arange(0, TILE), 0)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _before(key, amount, N: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return, for each layer, the count and the summed amounts of layers with smaller keys.

    Of equal keys, the lower layer's counts as smaller.
    """
    lane = tl.arange(0, N)[:, None]
    rank = tl.zeros([N], tl.int32)
    total = tl.zeros([N], tl.int64)
    for start in range(0, N, TILE):
        other = start + tl.arange(0, TILE)[None, :]
        other_key = _tile(key, start, N, TILE)
        before = (other_key < key[:, None]) | ((other_key == key[:, None]) & (other < lane))
        rank += tl.sum(before.to(tl.int32), 1)
        total += tl.sum(tl.where(before, _tile(amount, start, N, TILE), 0), 1)
    return rank, total


@triton.jit  # type: ignore[untyped-decorator]
def _open_weights(weights, rank, live, N: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return, for each layer, the largest weight among layers of its rank or above, and their sum.

    The sum is divided by that weight, so that tiny weights do not underflow.
    """
    largest = tl.zeros([N], tl.float64)
    for start in range(0, N, TILE):
        open_ = _tile(rank, start, N, TILE) >= rank[:, None]
        other = tl.where(open_, _tile(weights, start, N, TILE), 0.0)
        largest = tl.maximum(largest, tl.max(other, 1))
    largest = tl.where(live, largest, 1.0)
    total = tl.zeros([N], tl.float64)
    for start in range(0, N, TILE):
        open_ = _tile(rank, start, N, TILE) >= rank[:, None]
        other = tl.where(open_, _tile(weights, start, N, TILE), 0.0)
        total += tl.sum(other / largest[:, None], 1)
    return largest, tl.where(live, total, 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _fill(weights, rest, free, live, n, N: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the shares of layers whose weights are all positive, as the CPU's `_fill`."""
    tokens = free.to(tl.float64)
    # Padding has infinite keys.
    key = tl.where(live, tl.sqrt(tokens) / tl.sqrt(tl.where(live, weights, 1.0)), float("inf"))
    rank, before = _before(key, free, N, TILE)
    largest, total = _open_weights(weights, rank, live, N, TILE)
    level = (rest - before).to(tl.float64) / total
    fills = level * (weights / largest) >= tokens
    num_full = tl.min(tl.where(live & (fills == 0), rank, n), 0)
    first_open = live & (rank == num_full)  # no layer if all are full
    largest = tl.where(num_full < n, tl.sum(tl.where(first_open, largest, 0.0), 0), 1.0)
    level = tl.sum(tl.where(first_open, level, 0.0), 0)
    # Full layers do not use `share`. Without the minimum, it could overflow for them.
    share = level * (tl.minimum(weights, largest) / largest)
    return tl.where(rank < num_full, tokens, share)


@triton.jit  # type: ignore[untyped-decorator]
def _fill_evenly(rest, free, live, n, N: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the shares of layers of weight 1, as `_fill`."""
    rank, before = _before(tl.where(live, free, LARGEST), free, N, TILE)
    tokens = free.to(tl.float64)
    level = (rest - before).to(tl.float64) / tl.maximum(n - rank, 1).to(tl.float64)
    num_full = tl.min(tl.where(live & (level < tokens), rank, n), 0)
    share = tl.sum(tl.where(live & (rank == num_full), level, 0.0), 0)
    return tl.where(rank < num_full, tokens, share)


@triton.jit  # type: ignore[untyped-decorator]
def _divide(weights, rest, free, live, n, N: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return shares of `rest`, rounded down, and their scaled remainders, both int64."""
    weighted = weights > 0
    free_weighted = tl.where(weighted, free, 0)
    left = tl.maximum(rest - tl.sum(free_weighted, 0), 0)
    weights = tl.where(live, tl.where(weighted, weights, 1.0), 0.0)
    shares = _fill(weights, rest, free_weighted, live, n, N, TILE)
    shares += _fill_evenly(left, free - free_weighted, live, n, N, TILE)
    rounded = tl.minimum(tl.floor(shares + TOLERANCE).to(tl.int64), free)
    remainders = ((shares - rounded.to(tl.float64)) * REMAINDER_SCALE + TO_EVEN) - TO_EVEN
    return rounded, remainders.to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _round_up(rounded, remainders, caps, total, live, n, N: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Raise `rounded` by ones to sum `total`, as the CPU's `_round_up`."""
    spare = tl.where(live, caps - rounded, 0)
    missing = total - tl.sum(rounded, 0)
    rank, before = _before(tl.where(live, spare, LARGEST), spare, N, TILE)
    num_open = tl.maximum(n - rank, 1).to(tl.int64)
    tangents = missing - before
    # Division truncates, and the tangents need the floor.
    tangents = tl.where(tangents < 0, tangents - num_open + 1, tangents) // num_open
    rounds = tl.max(tl.where(live, tangents, -LARGEST), 0)
    raised = tl.where(live, tl.minimum(spare, rounds), 0)
    missing -= tl.sum(raised, 0)
    open_ = live & (spare > rounds)
    lane = tl.arange(0, N)[:, None]
    place = tl.zeros([N], tl.int64)
    for start in range(0, N, TILE):
        other = start + tl.arange(0, TILE)[None, :]
        remainder = _tile(remainders, start, N, TILE)
        first = remainder > remainders[:, None]
        first |= (remainder == remainders[:, None]) & (other <= lane)
        first &= _tile(open_.to(tl.int32), start, N, TILE) > 0
        place += tl.sum(first.to(tl.int64), 1)
    return rounded + raised + (open_ & (place <= missing)).to(tl.int64)


@triton.jit
def _preferences(entropy, shift, tau1, tau2):  # type: ignore[no-untyped-def]
    """Return CAKE's preferences. The temperatures are the bits of float64 numbers."""
    known = (entropy > 0) & (shift > 0)
    logs = tl.log(tl.where(known, entropy, 1.0)) / tau1.to(tl.float64, bitcast=True)
    logs += tl.log(tl.where(known, shift, 1.0)) / tau2.to(tl.float64, bitcast=True)
    largest = tl.max(tl.where(known, logs, float("-inf")), 0)
    return tl.where(known, tl.exp(tl.where(known, logs - largest, 0.0)), 0.0)


@triton.jit
def _caps(caps, cap, at, live):  # type: ignore[no-untyped-def]
    """Return each layer's maximum, and 0 for padding."""
    if caps is None:
        return tl.where(live, cap.to(tl.int64), 0)
    else:
        return tl.load(caps + at, mask=live, other=0)


# These arguments differ by prompt. Triton would specialise for 1 and for multiples of 16.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["total", "cap", "floor", "tau1", "tau2", "s_total", "n"],
    # Requests are rows of one tensor.
    do_not_specialize_on_alignment=["weights", "shift", "totals", "caps"],
)
def _apportion_kernel(  # type: ignore[no-untyped-def]
    weights,  # [R, n], or CAKE's entropy
    shift,  # [R, n] or None
    totals,  # [R] or one element, or None
    caps,  # [R, n] or None
    out,  # [R, n]
    total: tl.int64,
    cap: tl.int64,
    floor: tl.int64,
    tau1: tl.int64,
    tau2: tl.int64,
    s_total,
    n,
    N: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write `apportion` of one row, or `apportion_by_preference` if there is a shift."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, N)
    live = lane < n
    at = row * n + lane
    weight = tl.load(weights + at, mask=live, other=0).to(tl.float64)
    if shift is not None:
        other = tl.load(shift + at, mask=live, other=0).to(tl.float64)
        weight = _preferences(weight, other, tau1, tau2)
    rest = total.to(tl.int64) if totals is None else tl.load(totals + row * s_total)
    layer_caps = _caps(caps, cap, at, live)
    floors = tl.minimum(layer_caps, tl.where(live, floor.to(tl.int64), 0))
    rest -= tl.sum(floors, 0)
    free = layer_caps - floors
    rounded, remainders = _divide(weight, rest, free, live, n, N, TILE)
    rounded = _round_up(rounded, remainders, free, rest, live, n, N, TILE)
    tl.store(out + at, floors + rounded, mask=live)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["cap", "pages", "page_tokens", "tail", "floor_pages", "n"],
    do_not_specialize_on_alignment=["tokens", "caps"],
)
def _pages_kernel(  # type: ignore[no-untyped-def]
    tokens,  # [R, n]
    caps,  # [R, n] or None
    out,  # [R, n]
    cap: tl.int64,
    pages: tl.int64,
    page_tokens: tl.int64,
    tail: tl.int64,
    floor_pages: tl.int64,
    n,
    N: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write `round_to_pages` of one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, N)
    live = lane < n
    at = row * n + lane
    rest = pages.to(tl.int64)
    size = page_tokens.to(tl.int64)
    free = _caps(caps, cap, at, live)
    min_tokens = floor_pages.to(tl.int64) * size
    paged_tokens = tl.load(tokens + at, mask=live, other=0) - tail.to(tl.int64)
    paged_tokens = tl.minimum(tl.maximum(paged_tokens, min_tokens), free * size)
    rounded = paged_tokens // size
    remainders = paged_tokens % size
    floors = tl.zeros([N], tl.int64)
    if tl.sum(rounded, 0) > rest:
        floors = tl.minimum(free, tl.where(live, floor_pages.to(tl.int64), 0))
        rest -= tl.sum(floors, 0)
        free -= floors
        weights = tl.where(live, paged_tokens - min_tokens, 0).to(tl.float64)
        rounded, remainders = _divide(weights, rest, free, live, n, N, TILE)
    rounded = _round_up(rounded, remainders, free, rest, live, n, N, TILE)
    tl.store(out + at, floors + rounded, mask=live)


def run(
    weights: torch.Tensor, total: int | torch.Tensor, caps: int | torch.Tensor, floor: int
) -> torch.Tensor:
    return _launch(weights, None, total, caps, floor, 0, 0)


def run_preferences(
    entropy: torch.Tensor,
    shift: torch.Tensor,
    total: int | torch.Tensor,
    caps: int | torch.Tensor,
    tau1: float,
    tau2: float,
) -> torch.Tensor:
    return _launch(entropy, shift.contiguous(), total, caps, 0, _bits(tau1), _bits(tau2))


def run_pages(
    tokens: torch.Tensor,
    pages: int,
    page_tokens: int,
    tail: int,
    floor_pages: int,
    max_pages: int | torch.Tensor,
) -> torch.Tensor:
    layers, out = tokens.shape[-1], _out(tokens)
    caps, cap = _tensor_or_int(max_pages)
    if out.numel():
        _pages_kernel[(out.numel() // layers,)](
            tokens.contiguous(),
            caps,
            out,
            cap,
            pages,
            page_tokens,
            tail,
            floor_pages,
            layers,
            **_config(layers),
        )
    return out


def _launch(
    weights: torch.Tensor,
    shift: torch.Tensor | None,
    total: int | torch.Tensor,
    caps: int | torch.Tensor,
    floor: int,
    tau1: int,
    tau2: int,
) -> torch.Tensor:
    layers, out = weights.shape[-1], _out(weights)
    totals, total_int = _tensor_or_int(total)
    layer_caps, cap = _tensor_or_int(caps)
    if out.numel():
        _apportion_kernel[(out.numel() // layers,)](
            weights.contiguous(),
            shift,
            totals,
            layer_caps,
            out,
            total_int,
            cap,
            floor,
            tau1,
            tau2,
            0 if totals is None or totals.numel() == 1 else 1,
            layers,
            **_config(layers),
        )
    return out


def _out(weights: torch.Tensor) -> torch.Tensor:
    return torch.empty(weights.shape, dtype=torch.int64, device=weights.device)


def _tensor_or_int(x: int | torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Return the tensor or None, and the int or 0."""
    return (x.contiguous(), 0) if isinstance(x, torch.Tensor) else (None, x)


def _bits(number: float) -> int:
    """Return the bits of a float64. Triton passes floats as float32."""
    return int.from_bytes(struct.pack("<d", number), "little")


def _config(layers: int) -> dict[str, Any]:
    """Return the configuration and launch options for a number of layers.

    With larger tiles some kernels spill registers.
    """
    padded = int(triton.next_power_of_2(layers))
    tile = min(padded, 32) if padded <= 64 else 8
    return dict(N=padded, TILE=tile, num_warps=4 if padded <= 32 else 8)


def builds(sm: int) -> list[Build]:
    """Return the builds for 32 to 256 layers, with int and with tensor arguments."""
    ints = dict.fromkeys(("total", "cap", "floor", "tau1", "tau2"), "i64")
    page_ints = dict.fromkeys(("cap", "pages", "page_tokens", "tail", "floor_pages"), "i64")
    kinds: dict[str, tuple[Any, dict[str, str]]] = {
        "": (_apportion_kernel, dict(weights="*i64", totals="*i64", caps="*i64", **ints)),
        " preferences": (_apportion_kernel, dict(weights="*fp32", shift="*fp32", **ints)),
        " pages": (_pages_kernel, dict(tokens="*i64", **page_ints)),
    }
    optional = ("shift", "totals", "caps")
    return [
        Build(
            name=f"apportion{kind} N{layers}",
            kernel=kernel,
            config=_config(layers)
            | {x: None for x in optional if x in kernel.arg_names and x not in types},
            types=dict(types, out="*i64"),
            wide_loads=False,
        )
        for layers, (kind, (kernel, types)) in product((32, 64, 128, 256), kinds.items())
    ]
