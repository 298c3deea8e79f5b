"""Copy kept tokens into packed pages."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_same_pages, require


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
    """Copy the kept tokens of N rows into destination pages, which they fill in order.

    A row is one layer of one request. Layers and requests differ only in their page ids.

    Args:
        key_pages: ``[pages, Hkv, D, block_size]``, any dtype and strides.
        value_pages: ``[pages, Hkv, block_size, Dv]``, any dtype and strides.
        pages: ``[N, F]`` int: source page of each block of a row.
        kept: ``[N, Hkv, n]`` int: kept positions, ascending. The first
            ``counts[r] * block_size`` of row r are read. None copies the first ``counts[r]`` pages.
        counts: ``[N]`` int32: full pages that a row writes, at most `max_pages` and at most what
            `kept` can fill (unchecked, because a check would sync).
        destinations: ``[N, max_pages]`` int: row r writes the first ``counts[r]``, bit for bit.
            All pages are distinct, and no row may read one: rows run in no particular order.
        into: key and value pages that `destinations` index. None means `key_pages` and
            `value_pages`.

    Raises:
        ValueError: Shapes or dtypes disagree.
    """
    name, rows, heads = "move_kept", len(pages), key_pages.shape[1]
    check_same_pages(name, key_pages, value_pages)
    destination_keys, destination_values = into or (key_pages, value_pages)
    for source, target in ((key_pages, destination_keys), (value_pages, destination_values)):
        got, want = (target.dtype, *target.shape[1:]), (source.dtype, *source.shape[1:])
        require(got == want, name, f"pages of `into` must be {want}", got)
    if kept is not None:
        right = kept.dim() == 3 and kept.shape[:2] == (rows, heads)
        require(right, name, f"kept must be [{rows}, {heads}, n]", tuple(kept.shape))
    require(counts.shape == (rows,), name, f"counts must be [{rows}]", tuple(counts.shape))
    right = destinations.dim() == 2 and len(destinations) == rows
    require(right, name, f"destinations must be [{rows}, max_pages]", tuple(destinations.shape))
    if contract.runs_triton(key_pages):
        from kvcompress_kernels.move_kept.triton import run
    else:
        from kvcompress_kernels.move_kept.cpu import run

    arguments = key_pages, value_pages, pages, kept, counts, destinations
    run(*arguments, destination_keys, destination_values)
