"""Public ops over a whole prompt, from its first token to the last one known.

Pages are the strided views described in `kvcompress_kernels.ops`. A block may be as long as the
prompt. Slots of the last page from `tokens` on are read into no result. All maths is float32.
"""

import torch

from kvcompress_kernels.ops import check_floats, require, triton_takes


def column_sums(
    query: torch.Tensor, key_pages: torch.Tensor, pages: torch.Tensor, tokens: int, scale: float
) -> torch.Tensor:
    """Attention each token got from the last T tokens: ``c[h, j] = sum_i A[h, i, j]``.

    ``A = softmax(scale * q k^T)`` by rows, causal (METHODS section 3; H2O, arXiv:2306.14048). The
    sums of a prompt's chunks, each padded with zeros, add up to those of the whole prompt, whose
    total is `tokens` per query head. Query head h reads KV head ``h // (Hq // Hkv)``.

    Args:
        query: ``[T, Hq, D]`` any float dtype, rotated: positions ``tokens - T`` to ``tokens - 1``.
        key_pages: ``[N, Hkv, D, block_size]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order.
        tokens: prompt tokens known so far, those of `query` included.
        scale: factor on the logits, usually ``D ** -0.5``, times the scale of a quantised K.

    Returns:
        ``[Hq, tokens]`` float32.

    Raises:
        ValueError: shapes disagree, or `query` is empty or longer than the prompt.
    """
    name = "column_sums"
    count, heads, dim = query.shape
    require(key_pages.dim() == 4, name, "key_pages must be [N, Hkv, D, bs]", tuple(key_pages.shape))
    check_floats(name, "key_pages", key_pages)
    _, kv_heads, key_dim, block = key_pages.shape
    require(key_dim == dim, name, f"key_pages must have head dim {dim}", key_dim)
    require(heads % kv_heads == 0, name, f"Hq must be a multiple of Hkv={kv_heads}", heads)
    require(0 < count <= tokens, name, "0 < T <= tokens must hold", (count, tokens))
    _check_pages(name, pages, tokens, block)
    if triton_takes(query):
        from kvcompress_kernels.column_sums_triton import run
    else:
        from kvcompress_kernels.column_sums_ref import run

    return run(query, key_pages, pages, tokens, scale)


def value_scores(
    weights: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    *,
    fast: bool,
    reduce: str,
) -> torch.Tensor:
    """How much the attention output would change if one token went (CAOTE, arXiv:2504.14051).

    ``c_j = h_j / (1 - h_j) * ||o - v_j||_2`` for each query head's weights h, with
    ``o = sum_j h_j v_j``; exact if h is an attention row. ``1 - h_j`` is clamped at 1e-6, but for
    a token of more than half of a row's weight, whose c is ``h_j * ||o_without_j - v_j||``, the
    same and precise up to a weight of 1; `fast` has no such form, and takes for its ``1 - h_j``
    what the other tokens have. c is then reduced over the query heads of a KV head.

    Args:
        weights: ``[Hq, tokens]`` float32, >= 0, rows that sum to 1; values unchecked.
        value_pages: ``[N, Hkv, block_size, D]`` any float dtype and strides.
        pages: ``[ceil(tokens / block_size)]`` int64, the prompt's pages in order.
        tokens: prompt tokens.
        fast: FastCAOTE: o is the plain mean of the values of all tokens.
        reduce: "mean", or "l2", the root of the sum of squares: the change of the group's
            concatenated outputs.

    Returns:
        ``[Hkv, tokens]`` float32; the smallest is to be evicted first. Of a quantised V these are
        to be multiplied by its scale, which matters where layers are compared.

    Raises:
        ValueError: shapes disagree, `weights` is not float32, or `reduce` is unknown.
    """
    name = "value_scores"
    require(reduce in ("mean", "l2"), name, "reduce must be 'mean' or 'l2'", repr(reduce))
    require(value_pages.dim() == 4, name, "value_pages must be [N, Hkv, bs, D]", value_pages.shape)
    check_floats(name, "value_pages", value_pages)
    _, kv_heads, block, _ = value_pages.shape
    require(tokens > 0, name, "tokens must be positive", tokens)
    heads, columns = weights.shape
    require(columns == tokens, name, f"weights must be [Hq, {tokens}]", tuple(weights.shape))
    require(weights.dtype == torch.float32, name, "weights must be float32", weights.dtype)
    require(
        heads > 0 and heads % kv_heads == 0, name, f"Hq must be a multiple of Hkv={kv_heads}", heads
    )
    _check_pages(name, pages, tokens, block)
    if triton_takes(weights):
        from kvcompress_kernels.value_scores_triton import run
    else:
        from kvcompress_kernels.value_scores_ref import run

    return run(weights, value_pages, pages, tokens, fast, reduce)


def merge_evicted(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    kept: torch.Tensor,
    counts: torch.Tensor,
    least: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold evicted tokens into the kept ones their keys resemble (D2O, arXiv:2406.13035).

    Per KV head, each evicted token i has its nearest kept token ``near(i) = argmax_j u_ij`` (ties
    to the earlier j), ``u_ij = cos(k_i, k_j)``, norms clamped at 1e-12. It is merged iff
    ``u_i = max_j u_ij`` is at least the mean of u over the evicted tokens, up to rounding, so that
    equal cosines are all merged; else it is dropped. With e
    Euler's number and E_j merged into j, all at once:
    ``k_j <- (e k_j + sum_{i in E_j} exp(u_i) k_i) / (e + sum_{i in E_j} exp(u_i))``, values
    likewise. The paper's eq. 12 repeats the sum in its first weight, read as a typo here.

    Args:
        key_pages: ``[pages, Hkv, D, block_size]`` any float dtype and strides.
        value_pages: ``[pages, Hkv, block_size, Dv]`` likewise.
        pages: ``[N, ceil(tokens / block_size)]`` int64: for each of N layers, the prompt's pages
            in order.
        tokens: prompt tokens; those not kept are evicted.
        kept: ``[N, Hkv, n]`` int: kept positions per KV head, ascending, distinct, each below
            `tokens`; of row r the first ``counts[r]`` are read, values unchecked.
        counts: ``[N]`` int32: tokens that a row keeps, `least` to n; unchecked.
        least: a number of tokens that every row keeps, known to the host: the nearer, the less
            room and work are set aside for evicted tokens.

    Returns:
        Keys ``[N, Hkv, n, D]`` and values ``[N, Hkv, n, Dv]`` of the kept tokens, float32, or
        float64 from such a cache; zeros behind them. One that nothing was merged into is its
        cached value bit for bit.

    Raises:
        ValueError: shapes disagree, nothing is kept, more is kept than there is, or the cache is
            quantised.
    """
    name = "merge_evicted"
    require(key_pages.dim() == 4, name, "key_pages must be [N, Hkv, D, bs]", tuple(key_pages.shape))
    for pages_of in (key_pages, value_pages):
        rule = "takes no quantised cache: what is folded would have to be quantised anew"
        require(pages_of.element_size() > 1, name, rule, pages_of.dtype)
    blocks, heads, _, block = key_pages.shape
    require(
        value_pages.dim() == 4 and value_pages.shape[:3] == (blocks, heads, block),
        name,
        f"value_pages must be [{blocks}, {heads}, {block}, Dv]",
        tuple(value_pages.shape),
    )
    require(
        kept.dim() == 3 and kept.shape[1] == heads,
        name,
        f"kept must be [N, {heads}, n]",
        tuple(kept.shape),
    )
    rows, _, most = kept.shape
    require(0 < most <= tokens, name, "0 < n <= tokens must hold", (most, tokens))
    require(0 < least <= most, name, "0 < least <= n must hold", (least, most))
    require(counts.shape == (rows,), name, f"counts must be [{rows}]", tuple(counts.shape))
    _check_pages(name, pages, tokens, block, rows)
    if triton_takes(key_pages):
        from kvcompress_kernels.merge_triton import run
    else:
        from kvcompress_kernels.merge_ref import run

    return run(key_pages, value_pages, pages, tokens, kept, counts, least)


def _check_pages(op: str, pages: torch.Tensor, tokens: int, block: int, *rows: int) -> None:
    want = (*rows, -(-tokens // block))
    require(pages.shape == want, op, f"pages must be {list(want)}", tuple(pages.shape))
