"""Definition of `lag_scores`, in float64, one partition after the other."""

import torch

from kvcompress_kernels.prompt import cached_keys, cached_values

LEAST, MOST = 1e-18, 1e18
"""Of a channel's range that is divided by, and of what comes out: its squares are finite."""


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
        own, following = slice(start, start + lag), slice(start + lag, start + 2 * lag)
        shares = [_share(x[:, own], x[:, following]) for x in (keys, values)]
        scores.append((shares[0] + shares[1]) / 2)
    return torch.stack(scores, 1).float()


def _share(own: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Shares ``[Hkv, lag]`` of sum 1 of a partition's tokens, by the partition that follows."""
    low, high = following.amin(1, keepdim=True), following.amax(1, keepdim=True)
    y = ((own - low) / (high - low)).where(high - low >= LEAST, 0.0).clamp(-MOST, MOST)
    squares = ((y - y.mean(-1, keepdim=True)) ** 2).sum(-1)
    deviation = (squares / max(y.shape[-1] - 1, 1)).sqrt()
    return deviation.softmax(-1)
