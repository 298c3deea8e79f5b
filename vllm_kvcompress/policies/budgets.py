"""Integer arithmetic shared by all allocators; host side, float64."""

from collections.abc import Sequence
from math import floor

from vllm_kvcompress.plan import PagePlan

_SLACK = 1e-9  # a share this close below an integer is that integer


def apportion(
    weights: Sequence[float], total: int, caps: Sequence[int], lowest: int = 0
) -> list[int]:
    """Integers proportional to `weights` that sum exactly to ``min(total, sum(caps))``.

    Every layer first gets ``min(lowest, cap)``; the rest is poured in proportion to the weights,
    full layers leaving the others their share, and rounded by largest remainder, ties to the
    lower layer. Layers of weight 0 get tokens only when all weighted layers are full, evenly.

    Args:
        weights: one finite number >= 0 per layer; only ratios matter.
        total: tokens to give; at least the sum of the floors.
        caps: largest number each layer can take.
        lowest: floor of every layer.
    """
    if sum(caps) <= total:
        return list(caps)
    given = [min(lowest, cap) for cap in caps]
    room = [cap - have for cap, have in zip(caps, given, strict=True)]
    rest = total - sum(given)
    poured = _pour([max(weight, 0.0) for weight in weights], rest, room)
    whole = [min(floor(x + _SLACK), limit) for x, limit in zip(poured, room, strict=True)]
    order = sorted(range(len(room)), key=lambda i: (whole[i] - poured[i], i))
    left = rest - sum(whole)
    while left > 0:
        for i in order:
            if left > 0 and whole[i] < room[i]:
                whole[i] += 1
                left -= 1
    return [have + more for have, more in zip(given, whole, strict=True)]


def _pour(weights: list[float], rest: int, room: Sequence[int]) -> list[float]:
    """Water-fill: ``x_i = min(room_i, lam * weight_i)`` with sum `rest`; then evenly."""
    filled = [0.0] * len(weights)
    left = float(rest)
    for shares in (weights, [1.0] * len(weights)):
        active = [i for i in range(len(room)) if shares[i] > 0 and filled[i] < room[i]]
        while active and left > 0:
            lam = left / sum(shares[i] for i in active)
            full = [i for i in active if filled[i] + lam * shares[i] >= room[i]]
            if not full:
                for i in active:
                    filled[i] += lam * shares[i]
                return filled
            for i in full:
                left -= room[i] - filled[i]
                filled[i] = float(room[i])
            active = [i for i in active if i not in set(full)]
    return filled


def round_to_pages(tokens: Sequence[int], plan: PagePlan) -> list[int]:
    """Pages per layer for token budgets, with sum `plan.pages` exactly.

    Largest remainders of ``(n_l - tail) / block_size`` between the window's pages and all pages;
    ties to the lower layer. A layer ends at most one page from its token budget, unless the
    floors alone use up what others should have had.

    Args:
        tokens: tokens per layer n_l, window included.
    """
    low, high = plan.floor_pages, plan.full_blocks
    exact = [min(max((n - plan.tail) / plan.block_size, low), high) for n in tokens]
    pages = [floor(x + _SLACK) for x in exact]
    left = plan.pages - sum(pages)
    if left < 0:
        return apportion([x - low for x in exact], plan.pages, [high] * len(exact), low)
    order = sorted(range(len(exact)), key=lambda i: (pages[i] - exact[i], i))
    while left > 0:
        for i in order:
            if left > 0 and pages[i] < high:
                pages[i] += 1
                left -= 1
    return pages
