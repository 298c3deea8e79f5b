"""Torch code of `value_scores` for a CPU: float32, tiled over tokens. It reads the values twice.

The norm of ``o - v_j`` is computed from the difference, because expanding the square would cancel.
Near a weight of 1, both ``o - v_j`` and ``1 - h_j`` vanish, but their ratio does not. At most one
token of a query head has more than half of the weight. It is scored as
``h_j * || o_without_j - v_j ||``, with the sum of the other weights in place of ``1 - h_j``. All
other tokens use the same formula, so that equal tokens tie.
"""

import torch
from torch.nn.functional import pad

DIFFERENCES = 8 << 20
"""Bytes of ``o - v_j`` for one tile of tokens."""


def run(
    weights: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    fast: bool,
    reduce: str,
) -> torch.Tensor:
    _, kv_heads, block, dim = value_pages.shape
    h = weights.view(kv_heads, -1, tokens)
    tile = max(DIFFERENCES // (4 * len(weights) * dim), 1)
    tiles = torch.split(torch.arange(tokens, device=pages.device), tile)
    head = torch.arange(kv_heads, device=pages.device)[:, None]

    def values(token: torch.Tensor) -> torch.Tensor:
        """Return float32 values ``[Hkv, n, D]`` of tokens ``[n]``, or ``[Hkv, n]`` per head."""
        return value_pages[pages[token // block], head, token % block].float()

    heaviest = h.argmax(-1)  # [Hkv, G]
    top = h.gather(-1, heaviest[..., None])  # [Hkv, G, 1]
    others = h.scatter(-1, heaviest[..., None], 0.0)
    o = weights.new_zeros(kv_heads, 1 if fast else h.shape[1], dim)
    for token in tiles:
        v = values(token)
        o += v.sum(1, keepdim=True) if fast else others[..., token] @ v
    if fast:
        o /= tokens
    rest = others.sum(-1, keepdim=True)  # [Hkv, G, 1]
    if not fast:
        top_distance = torch.linalg.vector_norm(o / rest - values(heaviest), dim=-1, keepdim=True)
        o += top * values(heaviest)

    scores = weights.new_empty(kv_heads, tokens)
    for token in tiles:
        distance = torch.linalg.vector_norm(o.unsqueeze(2) - values(token).unsqueeze(1), dim=-1)
        share = h[..., token]
        dominant = (share > 0.5) & (rest > 0)
        left = torch.where(dominant, rest, 1 - share).clamp_min(1e-6)
        change = share / left * distance  # [Hkv, G, n]
        if not fast:
            change = torch.where(dominant, top * top_distance, change)
        scores[:, token] = (
            change.mean(1) if reduce == "mean" else torch.linalg.vector_norm(change, dim=1)
        )
    return scores


def run_rows(
    weights: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    lengths: torch.Tensor | None,
    fast: bool,
    reduce: str,
) -> torch.Tensor:
    """Score one row at a time, and pad shorter rows with 0."""
    block = value_pages.shape[2]
    row_lengths = [tokens] * len(weights) if lengths is None else lengths.tolist()
    scores = []
    for row_weights, row_pages, length in zip(weights, pages, row_lengths, strict=True):
        used_pages = row_pages[: -(-length // block)]
        used_weights = row_weights[:, :length].contiguous()
        row_scores = run(used_weights, value_pages, used_pages, length, fast, reduce)
        scores.append(pad(row_scores, (0, tokens - length)))
    return torch.stack(scores)
