"""Torch code of the `apportion` ops for a CPU. It reads no tensor values on the host."""

import math
import sys

import torch

_TOLERANCE = 1e-9
"""A share this close below an integer counts as that integer."""
_REMAINDER_SCALE = 1e9
"""Remainders are compared at this resolution, so that float64 noise does not break ties."""


def run(
    weights: torch.Tensor, total: int | torch.Tensor, caps: int | torch.Tensor, floor: int
) -> torch.Tensor:
    caps = _per_layer(caps, weights)
    floors = caps.clamp(max=floor)
    free = caps - floors
    rest = total - floors.sum(-1, keepdim=True)
    shares = _fill_proportionally(weights, rest, free)
    rounded = (shares + _TOLERANCE).floor().long().minimum(free)
    remainders = ((shares - rounded) * _REMAINDER_SCALE).round().long()
    return floors + _round_up(rounded, remainders, free, rest)


def run_preferences(
    entropy: torch.Tensor,
    shift: torch.Tensor,
    total: int | torch.Tensor,
    caps: int | torch.Tensor,
    tau1: float,
    tau2: float,
) -> torch.Tensor:
    return run(preferences(entropy, shift, tau1, tau2), total, caps, 0)


def run_pages(
    tokens: torch.Tensor,
    pages: int,
    page_tokens: int,
    tail: int,
    floor_pages: int,
    max_pages: int | torch.Tensor,
) -> torch.Tensor:
    max_pages = _per_layer(max_pages, tokens)
    min_tokens = floor_pages * page_tokens
    paged_tokens = (tokens - tail).clamp(min_tokens).minimum(max_pages * page_tokens)
    full_pages = paged_tokens // page_tokens
    scaled_down = run(paged_tokens - min_tokens, pages, max_pages, floor_pages)
    rounded = _round_up(full_pages, paged_tokens % page_tokens, max_pages, pages)
    return scaled_down.where(full_pages.sum(-1, keepdim=True) > pages, rounded)


def preferences(
    entropy: torch.Tensor, shift: torch.Tensor, tau1: float, tau2: float
) -> torch.Tensor:
    """Return CAKE's preferences divided by the largest, float64; 0 without entropy or shift."""
    h, v = entropy.double(), shift.double()
    logs = h.log() / tau1 + v.log() / tau2
    logs = logs.where((h > 0) & (v > 0), -math.inf)
    return (logs - logs.amax(-1, keepdim=True).clamp(min=-sys.float_info.max)).exp()


def _per_layer(caps: int | torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if isinstance(caps, int):
        return torch.full_like(weights, caps, dtype=torch.int64)
    return caps


def _fill_proportionally(
    weights: torch.Tensor, rest: int | torch.Tensor, free: torch.Tensor
) -> torch.Tensor:
    """Return real shares ``min(free_l, lambda * weight_l)`` that sum to ``min(rest, sum(free))``.

    Layers of weight 0 are filled last, evenly.

    Args:
        weights: ``[..., N]`` as in `apportion`.
        rest: tokens to distribute, >= 0; an int or ``[..., 1]``.
        free: ``[..., N]`` int64, >= 0, what each layer can still take.

    Returns:
        ``[..., N]`` float64.
    """
    weights, weighted = weights.double(), weights > 0
    free_weighted = free.where(weighted, 0)
    left = (rest - free_weighted.sum(-1, keepdim=True)).clamp(min=0)
    equal_weights = torch.ones_like(weights)
    shares = _fill(weights.where(weighted, 1.0), rest, free_weighted)
    return shares + _fill(equal_weights, left, free - free_weighted)


def _fill(weights: torch.Tensor, rest: int | torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    """Return the shares of `_fill_proportionally` for weights that are all positive.

    Layers fill up in the order of ``free / weight``, compared as a ratio of square roots so that
    neither end of float64 overflows. When k layers are full, the other layers divide the rest in
    proportion. k grows as long as the next layer fills up too. Weights are divided by the largest
    weight of the layers that are not full before they are summed: CAKE's preferences reach down to
    1e-310, where ``rest / sum`` would overflow.
    """
    free_tokens = free.double()
    order = (free_tokens.sqrt() / weights.sqrt()).sort(dim=-1, stable=True).indices
    ranked, free_tokens = weights.gather(-1, order), free_tokens.gather(-1, order)
    open_weights = (
        ranked.unsqueeze(-2).expand(*ranked.shape, ranked.shape[-1]).triu()
    )  # [..., k, N]
    largest = open_weights.amax(-1)
    left = rest - free_tokens.cumsum(-1) + free_tokens
    level = left / (open_weights / largest.unsqueeze(-1)).sum(-1)
    fills = (level * (ranked / largest) >= free_tokens).cumprod(-1)
    num_full = fills.sum(-1, keepdim=True)
    first_open = num_full.clamp(max=ranked.shape[-1] - 1)
    share = level.gather(-1, first_open) * (ranked / largest.gather(-1, first_open))
    return torch.empty_like(share).scatter_(-1, order, free_tokens.where(fills > 0, share))


def _round_up(
    rounded: torch.Tensor, remainders: torch.Tensor, caps: torch.Tensor, total: int | torch.Tensor
) -> torch.Tensor:
    """Raise `rounded` by ones to sum `total`, largest remainders first, skipping full layers.

    A pass adds 1 to each layer that is not full. Apply k complete passes at once, with the largest
    k such that ``sum(min(spare, k)) <= missing``. Then add the rest by largest remainder.
    """
    spare = caps - rounded
    missing = total - rounded.sum(-1, keepdim=True)
    num_layers = spare.shape[-1]
    ranked = spare.sort(-1).values
    num_open = torch.arange(num_layers, 0, -1, device=spare.device)
    # sum(min(spare, k)) is concave in k, so it is the smallest of its tangents, one for each
    # number of full layers. Solve each for k.
    tangents = (missing - ranked.cumsum(-1) + ranked).div(num_open, rounding_mode="floor")
    rounds = tangents.amax(-1, keepdim=True)
    missing = missing - spare.minimum(rounds).sum(-1, keepdim=True)
    order = remainders.sort(dim=-1, descending=True, stable=True).indices
    open_ = (spare > rounds).gather(-1, order)
    partial = open_ & (open_.cumsum(-1) <= missing)
    return rounded + spare.minimum(rounds) + torch.empty_like(partial).scatter_(-1, order, partial)
