"""CPU form of `value_scores`: float32, tiled over tokens, the values read twice.

The difference ``o - v_j`` is formed before its norm: expanding the square would cancel. Near a
weight of 1 both it and ``1 - h_j`` vanish while their ratio does not. One token of a query head can
have more than half of the weight: it is scored as ``h_j * || o_without_j - v_j ||``, and what the
others have is added up. Below that all tokens go one way, so that equal ones tie.
"""

import torch
from torch.nn.functional import pad

DIFFERENCES = 8 << 20
"""Bytes of o - v_j for one tile of tokens."""


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
        """``[Hkv, n, D]`` float32 for tokens ``[n]`` or, of each head its own, ``[Hkv, n]``."""
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
        apart = torch.linalg.vector_norm(o / rest - values(heaviest), dim=-1, keepdim=True)
        o += top * values(heaviest)

    scores = weights.new_empty(kv_heads, tokens)
    for token in tiles:
        distance = torch.linalg.vector_norm(o.unsqueeze(2) - values(token).unsqueeze(1), dim=-1)
        share = h[..., token]
        dominant = (share > 0.5) & (rest > 0)
        left = torch.where(dominant, rest, 1 - share).clamp_min(1e-6)
        change = share / left * distance  # [Hkv, G, n]
        if not fast:
            change = torch.where(dominant, top * apart, change)
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
    """Row by row; what a shorter row has no token for is 0."""
    block = value_pages.shape[2]
    every = [tokens] * len(weights) if lengths is None else lengths.tolist()
    scores = []
    for own, row, length in zip(weights, pages, every, strict=True):
        used = row[: -(-length // block)]
        found = run(own[:, :length].contiguous(), value_pages, used, length, fast, reduce)
        scores.append(pad(found, (0, tokens - length)))
    return torch.stack(scores)
