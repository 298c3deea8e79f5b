"""Reference of `value_scores`: float32, tiled over tokens, the values read twice.

The difference ``o - v_j`` is formed before its norm: expanding the square would cancel. For a
weight near 1 both it and ``1 - h_j`` vanish, and the clamp keeps their ratio finite.
"""

import torch

DIFFERENCES = 8 << 20  # bytes of o - v_j for one tile of tokens


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

    def values(token: torch.Tensor) -> torch.Tensor:
        """``[Hkv, n, D]`` float32."""
        return value_pages[pages[token // block], :, token % block].float().transpose(0, 1)

    o = weights.new_zeros(kv_heads, 1 if fast else h.shape[1], dim)
    for token in tiles:
        v = values(token)
        o += v.sum(1, keepdim=True) if fast else h[..., token] @ v
    if fast:
        o /= tokens

    scores = weights.new_empty(kv_heads, tokens)
    for token in tiles:
        distance = torch.linalg.vector_norm(o.unsqueeze(2) - values(token).unsqueeze(1), dim=-1)
        share = h[..., token]
        change = share / (1 - share).clamp_min(1e-6) * distance  # [Hkv, G, n]
        scores[:, token] = (
            change.mean(1) if reduce == "mean" else torch.linalg.vector_norm(change, dim=1)
        )
    return scores
