"""Integer arithmetic shared by all allocators: float64 and int64 tensors, and no value is read.

Layers are the last dimension; whatever comes before it is a batch.
"""

import torch

from vllm_kvcompress.methods.page_plan import PagePlan

_SLACK = 1e-9
"""A share this close below an integer is that integer."""
_DIGITS = 1e9
"""Remainders that agree this far are a tie: the rest is float64's noise."""


def apportion(
    weights: torch.Tensor, total: int | torch.Tensor, caps: torch.Tensor, floor: int = 0
) -> torch.Tensor:
    """Integers proportional to `weights` that sum exactly to ``min(total, sum(caps))``.

    Every layer first gets ``min(floor, cap)``; the rest is poured in proportion to the weights,
    full layers leaving the others their share, and rounded by largest remainder, ties to the
    lower layer. Layers of weight 0 get tokens only when all weighted layers are full, evenly.

    Args:
        weights: ``[..., N]`` finite numbers >= 0; only ratios matter. NaN counts as 0.
        total: tokens to give, at least the sum of the floors (unchecked: it may be on a device);
            an int or a scalar.
        caps: ``[..., N]`` int64, largest number that each layer can take.
        floor: smallest number that each layer gets, where its cap allows it.

    Returns:
        ``[..., N]`` int64.
    """
    given = caps.clamp(max=floor)
    room = caps - given
    rest = total - given.sum(-1, keepdim=True)
    shares = pour(weights, rest, room)
    whole = (shares + _SLACK).floor().long().minimum(room)
    remainders = ((shares - whole) * _DIGITS).round().long()
    return given + _hand_out(whole, remainders, room, rest)


def pour(weights: torch.Tensor, rest: int | torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Real shares ``min(room_l, lambda * weight_l)`` with sum `rest`, or all room if there is less.

    Layers of weight 0 come last, evenly.

    Args:
        weights: ``[..., N]`` as in `apportion`.
        rest: tokens to give, >= 0; an int or ``[..., 1]``.
        room: ``[..., N]`` int64, >= 0.

    Returns:
        ``[..., N]`` float64.
    """
    weights, heavy = weights.double(), weights > 0
    first = room.where(heavy, 0)
    left = (rest - first.sum(-1, keepdim=True)).clamp(min=0)
    even = torch.ones_like(weights)
    return _fill(weights.where(heavy, 1.0), rest, first) + _fill(even, left, room - first)


def _fill(weights: torch.Tensor, rest: int | torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Pour, where all weights are positive.

    Layers fill up in the order of ``room / weight`` (its root: neither end of float64 overflows).
    When k are full, the others divide what is left; it goes on while the next one fills up too.
    Weights are divided by the largest of those others before they are summed: CAKE's preferences
    reach down to 1e-310, where ``left / sum`` would overflow.
    """
    size = room.double()
    order = (size.sqrt() / weights.sqrt()).sort(dim=-1, stable=True).indices
    ranked, size = weights.gather(-1, order), size.gather(-1, order)
    others = ranked.unsqueeze(-2).expand(*ranked.shape, ranked.shape[-1]).triu()  # [..., k, N]
    top = others.amax(-1)
    level = (rest - size.cumsum(-1) + size) / (others / top.unsqueeze(-1)).sum(-1)
    fills = (level * (ranked / top) >= size).cumprod(-1)
    full = fills.sum(-1, keepdim=True)
    at = full.clamp(max=ranked.shape[-1] - 1)
    share = level.gather(-1, at) * (ranked / top.gather(-1, at))
    return torch.empty_like(share).scatter_(-1, order, size.where(fills > 0, share))


def _hand_out(
    whole: torch.Tensor, remainders: torch.Tensor, room: torch.Tensor, total: int | torch.Tensor
) -> torch.Tensor:
    """Raise `whole` to sum `total`: one each to the largest remainders, past layers that are full.

    As often as it takes: first k rounds that serve every layer that is not full, at once, with
    ``sum(min(spare, k)) <= left``, the largest such k; then one round that ends early.
    """
    spare = room - whole
    left = total - whole.sum(-1, keepdim=True)
    count = spare.shape[-1]
    ranked = spare.sort(-1).values
    behind = torch.arange(count, 0, -1, device=spare.device)
    # the sum is concave in k: the smallest of its tangents, one for each number of full layers
    tangents = (left - ranked.cumsum(-1) + ranked).div(behind, rounding_mode="floor")
    rounds = tangents.amax(-1, keepdim=True)
    left = left - spare.minimum(rounds).sum(-1, keepdim=True)
    order = remainders.sort(dim=-1, descending=True, stable=True).indices
    open_ = (spare > rounds).gather(-1, order)
    last = open_ & (open_.cumsum(-1) <= left)
    return whole + spare.minimum(rounds) + torch.empty_like(last).scatter_(-1, order, last)


def round_to_pages(
    tokens: torch.Tensor, plan: PagePlan, caps: torch.Tensor | None = None
) -> torch.Tensor:
    """Pages per layer for token budgets, with sum `plan.pages` exactly.

    Largest remainders of ``(n_l - tail) / block_size`` between the window's pages and all pages,
    in integers; ties to the lower layer. A layer ends less than a page from its token budget,
    unless layers that the window's pages lift above theirs take from the others.

    Args:
        tokens: ``[L]`` int64, tokens per layer n_l, window included.
        caps: ``[L]`` int64, pages that each layer has; None stands for all pages of the prompt.

    Returns:
        ``[L]`` int64.
    """
    size, low = plan.block_size, plan.floor_pages
    room = torch.full_like(tokens, plan.full_blocks) if caps is None else caps
    held = (tokens - plan.tail).clamp(low * size).minimum(room * size)
    whole = held // size
    lifted = apportion(held - low * size, plan.pages, room, low)
    rounded = _hand_out(whole, held % size, room, plan.pages)
    return lifted.where(whole.sum() > plan.pages, rounded)
