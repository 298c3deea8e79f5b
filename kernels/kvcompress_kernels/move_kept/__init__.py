"""Kept tokens, copied into the pages that they fill."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import require


def move_kept(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    kept: torch.Tensor | None,
    counts: torch.Tensor,
    destinations: torch.Tensor,
    *,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Copy the kept tokens of N layers into other pages, which they fill one after the other.

    In the page pool a layer is only other page ids, and so is a layer of another request.

    Args:
        key_pages: ``[pages, Hkv, D, block_size]``, any dtype and strides.
        value_pages: ``[pages, Hkv, block_size, Dv]`` likewise.
        pages: ``[N, F]`` int: page of each block of a row's prompt.
        kept: ``[N, Hkv, n]`` int: kept positions, ascending; of row r the first
            ``counts[r] * block_size`` are read. None copies the first ``counts[r]`` pages.
        counts: ``[N]`` int32: pages that a row fills, each of them wholly; at most `most`, and
            those that `kept` can fill (unchecked: checking would sync).
        destinations: ``[N, most]`` int: the first ``counts[r]`` of row r are written, bit for bit,
            and no page is named twice. None may be read, by any row: rows run in no order.
        into: key and value pages that `destinations` name; None stands for those that are read.

    Raises:
        ValueError: shapes or dtypes disagree.
    """
    name, rows, heads, block = "move_kept", len(pages), key_pages.shape[1], key_pages.shape[3]
    require(
        value_pages.shape[:3] == (key_pages.shape[0], heads, block),
        name,
        f"value_pages must be [{key_pages.shape[0]}, {heads}, {block}, D]",
        tuple(value_pages.shape),
    )
    to_keys, to_values = into or (key_pages, value_pages)
    for x, to in ((key_pages, to_keys), (value_pages, to_values)):
        got, want = (to.dtype, *to.shape[1:]), (x.dtype, *x.shape[1:])
        require(got == want, name, f"pages of `into` must be {want}", got)
    if kept is not None:
        right = kept.dim() == 3 and kept.shape[:2] == (rows, heads)
        require(right, name, f"kept must be [{rows}, {heads}, n]", tuple(kept.shape))
    require(counts.shape == (rows,), name, f"counts must be [{rows}]", tuple(counts.shape))
    right = destinations.dim() == 2 and len(destinations) == rows
    require(right, name, f"destinations must be [{rows}, most]", tuple(destinations.shape))
    if contract.triton_takes(key_pages):
        from kvcompress_kernels.move_kept.triton import run
    else:
        from kvcompress_kernels.move_kept.cpu import run

    run(key_pages, value_pages, pages, kept, counts, destinations, to_keys, to_values)
