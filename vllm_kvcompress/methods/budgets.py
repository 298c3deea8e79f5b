"""Integer apportionment for all allocators, on the device.

Everything is float64 and int64 tensors, and the host reads no value. Layers are the last dimension.
Leading dimensions are batch dimensions.
"""

import torch

from vllm_kvcompress.methods.page_plan import PagePlan

_TOLERANCE = 1e-9
"""A share this close below an integer counts as that integer."""
_REMAINDER_SCALE = 1e9
"""Remainders are compared at this resolution, so that float64 noise does not break ties."""


def apportion(
    weights: torch.Tensor, total: int | torch.Tensor, caps: torch.Tensor, floor: int = 0
) -> torch.Tensor:
    """Return integers proportional to `weights` with sum exactly ``min(total, sum(caps))``.

    Every layer first gets ``min(floor, cap)``. The rest is divided in proportion to the weights; a
    full layer's excess goes to the other layers. Shares are rounded by largest remainder, ties to
    the lower layer. Layers of weight 0 get tokens, evenly, only when all weighted layers are full.

    Args:
        weights: ``[..., N]`` finite numbers >= 0. Only ratios matter. NaN counts as 0.
        total: tokens to distribute, an int or a scalar tensor. At least the sum of the floors (not
            checked, since it may be on a device).
        caps: ``[..., N]`` int64, maximum of each layer.
        floor: minimum of each layer, where its cap allows it.

    Returns:
        ``[..., N]`` int64.
    """
    floors = caps.clamp(max=floor)
    free = caps - floors
    rest = total - floors.sum(-1, keepdim=True)
    shares = fill_proportionally(weights, rest, free)
    rounded = (shares + _TOLERANCE).floor().long().minimum(free)
    remainders = ((shares - rounded) * _REMAINDER_SCALE).round().long()
    return floors + _round_up(rounded, remainders, free, rest)


def fill_proportionally(
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
    """Return the shares of `fill_proportionally` for weights that are all positive.

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

    One pass per layer may not be enough. First k passes over all layers that are not full are
    applied at once, with the largest k such that ``sum(min(spare, k)) <= missing``. One partial
    pass follows.
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


def round_to_pages(
    tokens: torch.Tensor, plan: PagePlan, caps: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the pages per layer for token budgets, with sum exactly `plan.pages`.

    Largest remainders of ``(n_l - tail) / page_tokens``, between the window's pages and all pages,
    in integers; ties to the lower layer. A layer is less than a page from its token budget, unless
    the minimum for the window's pages takes pages from other layers.

    Args:
        tokens: ``[L]`` int64, tokens per layer n_l, window included.
        caps: ``[L]`` int64, pages that each layer has; None means all pages of the prompt.

    Returns:
        ``[L]`` int64.
    """
    page_tokens, min_pages = plan.page_tokens, plan.floor_pages
    max_pages = torch.full_like(tokens, plan.full_pages) if caps is None else caps
    min_tokens = min_pages * page_tokens
    paged_tokens = (tokens - plan.tail).clamp(min_tokens).minimum(max_pages * page_tokens)
    full_pages = paged_tokens // page_tokens
    scaled_down = apportion(paged_tokens - min_tokens, plan.pages, max_pages, min_pages)
    rounded = _round_up(full_pages, paged_tokens % page_tokens, max_pages, plan.pages)
    return scaled_down.where(full_pages.sum() > plan.pages, rounded)
