"""Quantise kept tokens into packed pages of the format `k4v3`."""

import torch

from kvcompress_kernels import contract, k4v3
from kvcompress_kernels.contract import check_keys, check_tensor, check_values, require


def quantise_kept(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    kept: torch.Tensor | None,
    tokens: torch.Tensor,
    destinations: torch.Tensor,
    *,
    into: torch.Tensor,
    key_scale: float | torch.Tensor = 1.0,
    value_scale: float | torch.Tensor = 1.0,
) -> None:
    """Write the kept tokens of N rows into packed pages, as 4-bit keys and 3-bit values.

    A row is one layer of one request. Its tokens form groups of 64 in the order of `kept`, and the
    groups fill the destination pages in order. The last group may have fewer tokens; the codes,
    scales and minima of its missing tokens are 0. The op does not write later groups of the last
    page. The unused end of a written group may hold anything.

    A NaN gets code 0 and does not change how other numbers are quantised. Infinities and numbers
    past the largest float16 saturate (`k4v3.quantise`).

    Args:
        key_pages: ``[pages, Hkv, D, block_size]`` float16, bfloat16, float32 or float8, any
            strides.
        value_pages: ``[pages, Hkv, block_size, D]``, same dtype, any strides.
        pages: ``[N, F]`` int: source page of each block of a row.
        kept: ``[N, Hkv, n]`` int: kept positions. The first ``tokens[r]`` of row r are read. None
            keeps the first ``tokens[r]`` positions.
        tokens: ``[N]`` int32: kept tokens of each row, at most `n` and at most what `max_pages`
            pages hold (unchecked, because a check would sync).
        destinations: ``[N, max_pages]`` int: row r writes as many of them as its tokens need. All
            pages are distinct, and no row may read a page that any row writes, because groups run
            in no particular order (unchecked).
        into: ``[P, Hkv, rows, 2 * D * itemsize]`` uint8: the pages that `destinations` index,
            as bytes of a cache with numbers of `itemsize` bytes. The last axis is contiguous, and
            the other strides are even. It may share memory with the source pages.
        key_scale, value_scale: factor on the stored numbers of a float8 cache: one float, which is
            rounded to float32, or ``[N]`` float32 with one factor per row.

    Raises:
        ValueError: Shapes, dtypes or strides disagree, or the pages cannot hold groups.
    """
    name, rows = "quantise_kept", len(pages)
    check_keys(name, key_pages)
    check_values(name, value_pages)
    count, heads, dim, block = key_pages.shape
    dtype = key_pages.dtype
    check_tensor(name, "value_pages", value_pages, (count, heads, block, dim), dtype)
    if kept is not None:
        right = kept.dim() == 3 and kept.shape[:2] == (rows, heads)
        require(right, name, f"kept must be [{rows}, {heads}, n]", tuple(kept.shape))
    require(tokens.shape == (rows,), name, f"tokens must be [{rows}]", tuple(tokens.shape))
    right = destinations.dim() == 2 and len(destinations) == rows
    require(right, name, f"destinations must be [{rows}, max_pages]", tuple(destinations.shape))
    _check_packed_pages(name, into, heads, dim)
    for label, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if isinstance(scale, torch.Tensor):
            right = scale.shape == (rows,) and scale.dtype == torch.float32
            rule = f"{label} must be a float, or [{rows}] float32"
            require(right, name, rule, (tuple(scale.shape), scale.dtype))
    if contract.runs_triton(key_pages):
        from kvcompress_kernels.quantise_kept.triton import run
    else:
        from kvcompress_kernels.quantise_kept.cpu import run

    arguments = key_pages, value_pages, pages, kept, tokens, destinations, into
    run(*arguments, key_scale, value_scale)


def _check_packed_pages(name: str, into: torch.Tensor, heads: int, dim: int) -> None:
    """Raise ``ValueError`` unless `into` has the bytes of pages that can hold groups."""
    require(into.dtype == torch.uint8, name, "into must be uint8", into.dtype)
    widths = [2 * dim * itemsize for itemsize in (1, 2, 4)]
    right = into.dim() == 4 and into.shape[1] == heads and into.shape[3] in widths
    rule = f"into must be [P, {heads}, rows, bytes] with bytes in {widths}"
    require(right, name, rule, tuple(into.shape))
    *outer, last = (step for step, size in zip(into.stride(), into.shape, strict=True) if size > 1)
    right = last == 1 and not any(step % 2 for step in (*outer, into.storage_offset()))
    rule = "into must have a contiguous last axis, and even strides and offset for float16 scales"
    require(right, name, rule, (into.stride(), into.storage_offset()))
    reason = k4v3.refusal(dim, into.shape[2], into.shape[3] // (2 * dim))
    require(not reason, name, reason, tuple(into.shape))
