"""Integer arithmetic shared by all allocators; host side, float64."""

import math
from collections.abc import Sequence

from vllm_kvcompress.plan import PagePlan

_SLACK = 1e-9  # a share this close below an integer is that integer
_DIGITS = 9  # remainders that agree this far are a tie: the rest is float64's noise


def apportion(
    weights: Sequence[float], total: int, caps: Sequence[int], floor: int = 0
) -> list[int]:
    """Integers proportional to `weights` that sum exactly to ``min(total, sum(caps))``.

    Every layer first gets ``min(floor, cap)``; the rest is poured in proportion to the weights,
    full layers leaving the others their share, and rounded by largest remainder, ties to the
    lower layer. Layers of weight 0 get tokens only when all weighted layers are full, evenly.

    Args:
        weights: one finite number >= 0 per layer; only ratios matter.
        total: tokens to give.
        caps: largest number that each layer can take.
        floor: smallest number that each layer gets, where its cap allows it.

    Raises:
        ValueError: `total` cannot pay for the floors.
    """
    if sum(caps) <= total:
        return list(caps)
    given = [min(floor, cap) for cap in caps]
    room = [cap - have for cap, have in zip(caps, given, strict=True)]
    rest = total - sum(given)
    if rest < 0:
        raise ValueError(f"total must be at least the sum of the floors {sum(given)}, got {total}")
    shares = pour(weights, rest, room)
    whole = [min(math.floor(x + _SLACK), limit) for x, limit in zip(shares, room, strict=True)]
    remainders = [round(x - n, _DIGITS) for x, n in zip(shares, whole, strict=True)]
    more = _hand_out(whole, remainders, room, rest)
    return [have + extra for have, extra in zip(given, more, strict=True)]


def pour(weights: Sequence[float], rest: int, room: Sequence[int]) -> list[float]:
    """Real shares ``min(room_l, lambda * weight_l)`` with sum `rest`, or all room if there is less.

    Layers of weight 0 come last, evenly.

    Weights are divided by the largest active one before they are summed: CAKE's preferences
    reach down to 1e-310, where ``rest / sum`` would overflow.
    """
    shares = [0.0] * len(room)
    left = float(rest)
    for tier in (weights, [1.0] * len(room)):
        active = [i for i, limit in enumerate(room) if tier[i] > 0 and shares[i] < limit]
        while active and left > 0:
            top = max(tier[i] for i in active)
            scaled = {i: tier[i] / top for i in active}
            level = left / sum(scaled.values())
            full = [i for i in active if level * scaled[i] >= room[i]]
            if not full:
                for i in active:
                    shares[i] = level * scaled[i]
                return shares
            for i in full:
                shares[i] = float(room[i])
                left -= room[i]
            active = [i for i in active if shares[i] < room[i]]
    return shares


def _hand_out(
    whole: list[int], remainders: Sequence[float], room: Sequence[int], total: int
) -> list[int]:
    """`whole` raised to sum `total`: one each to the largest remainders, skipping full layers."""
    assert sum(whole) <= total <= sum(room), (whole, room, total)
    out, left = list(whole), total - sum(whole)
    order = sorted(range(len(out)), key=lambda i: (-remainders[i], i))
    while left > 0:
        for i in order:
            if left > 0 and out[i] < room[i]:
                out[i] += 1
                left -= 1
    return out


def round_to_pages(tokens: Sequence[int], plan: PagePlan) -> list[int]:
    """Pages per layer for token budgets, with sum `plan.pages` exactly.

    Largest remainders of ``(n_l - tail) / block_size`` between the window's pages and all pages,
    in integers; ties to the lower layer. A layer ends less than a page from its token budget,
    unless layers that the window's pages lift above theirs take from the others.

    Args:
        tokens: tokens per layer n_l, window included.
    """
    size, low, high = plan.block_size, plan.floor_pages, plan.full_blocks
    held = [min(max(n - plan.tail, low * size), high * size) for n in tokens]
    whole = [n // size for n in held]
    room = [high] * len(held)
    if sum(whole) > plan.pages:
        return apportion([n - low * size for n in held], plan.pages, room, low)
    return _hand_out(whole, [n % size for n in held], room, plan.pages)
