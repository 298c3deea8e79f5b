"""Public ops: the contract, the checks, and the choice of implementation.

Key and value pages come as strided views of one page array, whatever their layout in memory:
``key_pages [N, Hkv, D, block_size]`` and ``value_pages [N, Hkv, block_size, D]``. A page id is
an index into their first axis. Page ids are not range-checked: checking them would sync.

A quantised cache comes in its own dtype, float8_e4m3fn or float8_e5m2, not as bytes. Its values
are read as that dtype says; the scale that a layer's K or V was divided by is the caller's.
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


def check_floats(op: str, name: str, pages: torch.Tensor) -> None:
    """Raise ``ValueError`` for a quantised cache as vLLM allocates it: bytes are not its values."""
    ok = pages.is_floating_point()
    require(ok, op, f"{name} must be floats: view a quantised cache as its float8", pages.dtype)


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
        scale: factor on the logits, usually ``D ** -0.5``, times the scale of a quantised K.
        variance: also return the variance; needs ``w >= 2``.

    Raises:
        ValueError: shapes disagree, the window is empty or as long as the prompt, or `variance`
            is asked of a single row.
    """
    w, heads, dim = query.shape
    name = "window_scores"
    require(key_pages.dim() == 4, name, "key_pages must be [N, Hkv, D, bs]", key_pages.shape)
    check_floats(name, "key_pages", key_pages)
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
    if triton_takes(key_pages):
        from kvcompress_kernels.compact_triton import run
    else:
        from kvcompress_kernels.compact_ref import run

    run(key_pages, value_pages, pages, kept, counts, destinations, to_keys, to_values)
