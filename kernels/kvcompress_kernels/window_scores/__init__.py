"""What an observation window thinks of the prompt before it."""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import check_floats, require
from kvcompress_kernels.window_scores.result import WindowScores


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
    if contract.triton_takes(query):
        from kvcompress_kernels.window_scores.triton import run
    else:
        from kvcompress_kernels.window_scores.reference import run

    return run(query, key_pages, pages, tokens, scale, variance)
