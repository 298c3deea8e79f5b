"""Public ops: the contract, the checks, and the choice of implementation.

Key and value pages come as strided views of one page array, whatever their layout in memory:
``key_pages [N, Hkv, D, block_size]`` and ``value_pages [N, Hkv, block_size, D]``. A page id is
an index into their first axis. Page ids are not range-checked: checking them would sync.
"""

from typing import NamedTuple

import torch


class WindowScores(NamedTuple):
    """What the last w queries of a prompt think of its past, P = tokens - w columns."""

    total: torch.Tensor
    """``[Hq, P]`` float32: attention of the w rows summed, ``sum_i A[h, i, j]``."""
    variance: torch.Tensor | None
    """``[Hq, P]`` float32: sample variance over the w rows (ddof 1), if it was asked for."""
    entropy: torch.Tensor
    """Scalar float32: ``-sum A log A`` over heads, rows and past columns (CAKE's H)."""
    shift: torch.Tensor
    """Scalar float32: `variance` summed over heads and columns (CAKE's V); 0 without it."""
    recent: torch.Tensor
    """``[Hq, w]`` float32: attention of the w rows to the window's own columns, summed."""
    last: torch.Tensor
    """``[Hq, tokens]`` float32: attention of the last row to every key."""


def require(ok: bool, op: str, rule: str, got: object) -> None:
    """Raise ``ValueError`` with one sentence unless `ok`."""
    if not ok:
        raise ValueError(f"{op}: {rule}; got {got}")


def triton_takes(tensor: torch.Tensor) -> bool:
    """Whether an op on `tensor` runs its Triton kernels; the reference runs everywhere else."""
    return tensor.is_cuda


def window_scores(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    *,
    variance: bool,
) -> WindowScores:
    """Attention of an observation window to the prompt before it, reduced over the window.

    ``A = softmax(scale * q k^T)`` over all `tokens` keys, causal inside the window, float32; the
    past columns are not renormalised after cutting (CAKE, arXiv:2503.12491, eq. 5 to 7;
    SnapKV, arXiv:2404.14469). Entropy is summed as ``A * (s - LSE)``, finite without an epsilon.
    Query head h reads KV head ``h // (Hq // Hkv)``.

    Args:
        query: ``[w, Hq, D]`` any float dtype, rotated, in position order.
        key_pages: ``[N, Hkv, D, block_size]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order. Slots of the
            last page from `tokens` on are not read into any result.
        tokens: prompt length S, the window included.
        scale: factor on the logits, usually ``D ** -0.5``.
        variance: also return the variance; needs ``w >= 2``.

    Raises:
        ValueError: shapes disagree, the window is empty or as long as the prompt, or `variance`
            is asked of a single row.
    """
    w, heads, dim = query.shape
    name = "window_scores"
    require(key_pages.dim() == 4, name, "key_pages must be [N, Hkv, D, bs]", key_pages.shape)
    require(key_pages.shape[2] == dim, name, f"key_pages must have head dim {dim}", key_pages.shape)
    kv_heads, block = key_pages.shape[1], key_pages.shape[3]
    require(heads % kv_heads == 0, name, f"Hq must be a multiple of Hkv={kv_heads}", heads)
    require(0 < w < tokens, name, "0 < window < tokens must hold", (w, tokens))
    require(w > 1 or not variance, name, "a variance needs a window of at least 2", w)
    want = -(-tokens // block)
    require(pages.shape == (want,), name, f"pages must be [{want}]", tuple(pages.shape))
    if triton_takes(query):
        from kvcompress_kernels.window_scores_triton import run
    else:
        from kvcompress_kernels.window_scores_ref import run

    return run(query, key_pages, pages, tokens, scale, variance)


def gather_kept(
    key_pages: torch.Tensor, value_pages: torch.Tensor, pages: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the kept tokens of one layer, packed as whole pages, into fresh memory.

    Args:
        key_pages: ``[N, Hkv, D, block_size]``.
        value_pages: ``[N, Hkv, block_size, D]``.
        pages: ``[F]`` int64: page of each block of the prompt.
        kept: ``[Hkv, n]`` int64: kept positions per KV head, ascending, each below
            ``F * block_size``; n is a multiple of block_size.

    Returns:
        Keys ``[n / block_size, Hkv, D, block_size]`` and values
        ``[n / block_size, Hkv, block_size, D]``, in the dtype of the cache, bit for bit.

    Raises:
        ValueError: n is not a multiple of the block size, or the heads differ.
    """
    _check_kept("gather_kept", key_pages, value_pages, kept)
    if triton_takes(key_pages):
        from kvcompress_kernels.compact_triton import gather
    else:
        from kvcompress_kernels.compact_ref import gather

    return gather(key_pages, value_pages, pages, kept)


def scatter_kept(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    destination: torch.Tensor,
) -> None:
    """Write packed pages from `gather_kept` to the pages `destination` ``[p]`` int64.

    Raises:
        ValueError: there are not as many destinations as packed pages.
    """
    require(
        len(destination) == len(keys) == len(values),
        "scatter_kept",
        f"destination must name {len(keys)} pages",
        len(destination),
    )
    if triton_takes(key_pages):
        from kvcompress_kernels.compact_triton import scatter
    else:
        from kvcompress_kernels.compact_ref import scatter

    scatter(key_pages, value_pages, keys, values, destination)


def compact(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    kept: torch.Tensor,
    destination: torch.Tensor,
) -> None:
    """`gather_kept` then `scatter_kept`: move the kept rows of one layer into other pages.

    Everything is read before anything is written, so `destination` may overlap `pages`.
    """
    keys, values = gather_kept(key_pages, value_pages, pages, kept)
    scatter_kept(key_pages, value_pages, keys, values, destination)


def _check_kept(
    op: str, key_pages: torch.Tensor, value_pages: torch.Tensor, kept: torch.Tensor
) -> None:
    heads, block = key_pages.shape[1], key_pages.shape[3]
    require(
        value_pages.shape[:3] == (key_pages.shape[0], heads, block),
        op,
        f"value_pages must be [{key_pages.shape[0]}, {heads}, {block}, D]",
        tuple(value_pages.shape),
    )
    require(kept.shape[0] == heads, op, f"kept must be [{heads}, n]", tuple(kept.shape))
    require(kept.shape[1] % block == 0, op, f"n must be a multiple of {block}", kept.shape[1])


def page_tables(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    packed: torch.Tensor,
    num_packed: torch.Tensor,
    first_block: torch.Tensor,
    layer_offset: torch.Tensor,
    block_stride: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every layer's block table and sequence length for one batch, compressed or not.

    Layer l of request r reads its packed pages, then the ordinary blocks from `first_block` on:
    ``table[l, r, c] = packed[r, l, c]`` for ``c < num_packed[r, l]``, else the flat page
    ``layer_offset[l] + block_stride * block_table[r, c - num_packed[r, l] + first_block[r]]``.
    A request that was not compressed has ``num_packed == first_block == 0``.

    Args:
        block_table: ``[R, W]`` int32: vLLM's block ids.
        seq_lens: ``[R]`` int32: vLLM's sequence lengths, in tokens.
        packed: ``[R, L, C]`` int32: flat pages that hold each layer's kept prompt tokens.
        num_packed: ``[R, L]`` int32, at most C and at most ``first_block``.
        first_block: ``[R]`` int32: index of the first ordinary block that is still read.
        layer_offset: ``[L]`` int32: flat page of block 0 in each layer.
        block_stride: flat pages between block b and b + 1 of one layer.
        block_size: tokens in a block.

    Returns:
        ``[L, R, W]`` int32 tables (entries past a layer's length repeat an ordinary block that
        the row owns or the null block) and ``[L, R]`` int32 lengths in tokens, both contiguous.
    """
    rows, width = block_table.shape
    layers = layer_offset.shape[0]
    require(seq_lens.shape == (rows,), "page_tables", f"seq_lens must be [{rows}]", seq_lens.shape)
    require(
        packed.shape[:2] == num_packed.shape == (rows, layers),
        "page_tables",
        f"packed and num_packed must start with [{rows}, {layers}]",
        (tuple(packed.shape), tuple(num_packed.shape)),
    )
    require(width > 0, "page_tables", "block_table must have columns", width)
    if triton_takes(block_table):
        from kvcompress_kernels.page_tables_triton import run
    else:
        from kvcompress_kernels.page_tables_ref import run

    return run(
        block_table,
        seq_lens,
        packed,
        num_packed,
        first_block,
        layer_offset,
        block_stride,
        block_size,
    )
