"""Reference for `lag_scores` in float64, one partition at a time."""

import torch

from kvcompress_kernels.cached_prompt import cached_keys, cached_values

MIN_RANGE = 1e-18
"""Smallest range of a channel to divide by. Channels with a smaller range are ignored."""
MAX_SCALED = 1e18
"""Bound on a scaled element, so that its square is finite in float32."""


def run(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    parts: int,
    sinks: int,
    lag: int,
) -> torch.Tensor:
    tokens = sinks + (parts + 1) * lag
    keys = cached_keys(key_pages, pages, tokens)
    values = cached_values(value_pages, pages, tokens)
    scores = []
    for start in range(sinks, sinks + parts * lag, lag):
        part, following = slice(start, start + lag), slice(start + lag, start + 2 * lag)
        shares = [_shares(x[:, part], x[:, following]) for x in (keys, values)]
        scores.append((shares[0] + shares[1]) / 2)
    return torch.stack(scores, 1).float()


def _shares(part: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the softmax ``[Hkv, lag]`` over a partition's tokens, scaled by the next partition."""
    low, high = following.amin(1, keepdim=True), following.amax(1, keepdim=True)
    y = ((part - low) / (high - low)).where(high - low >= MIN_RANGE, 0.0)
    y = y.clamp(-MAX_SCALED, MAX_SCALED)
    squares = ((y - y.mean(-1, keepdim=True)) ** 2).sum(-1)
    deviation = (squares / max(y.shape[-1] - 1, 1)).sqrt()
    return deviation.softmax(-1)
