"""References for the `apportion` ops: exact rationals, one row at a time (docs/methods.md 2.0)."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch


def run(
    weights: torch.Tensor, total: int | torch.Tensor, caps: int | torch.Tensor, floor: int
) -> torch.Tensor:
    rows = (
        _rows(weights),
        _rows(_expanded(total, weights[..., :1])),
        _rows(_expanded(caps, weights)),
    )
    return _stacked(
        weights,
        lambda row: apportioned(rows[0][row], int(rows[1][row][0]), rows[2][row], floor),
    )


def run_preferences(
    entropy: torch.Tensor,
    shift: torch.Tensor,
    total: int | torch.Tensor,
    caps: int | torch.Tensor,
    tau1: float,
    tau2: float,
) -> torch.Tensor:
    values = zip(entropy.flatten().tolist(), shift.flatten().tolist(), strict=True)
    weights = [_preference(h, tau1) * _preference(v, tau2) for h, v in values]
    return run(torch.tensor(weights, dtype=torch.float64).view(entropy.shape), total, caps, 0)


def run_pages(
    tokens: torch.Tensor,
    pages: int,
    page_tokens: int,
    tail: int,
    floor_pages: int,
    max_pages: int | torch.Tensor,
) -> torch.Tensor:
    rows, caps = _rows(tokens), _rows(_expanded(max_pages, tokens))
    fixed = pages, page_tokens, tail, floor_pages
    return _stacked(tokens, lambda row: pages_of(rows[row], *fixed, caps[row]))


def apportioned(
    weights: Sequence[float | Fraction], total: int, caps: Sequence[int], floor: int = 0
) -> list[int]:
    """Return `apportion` of one row."""
    if sum(caps) <= total:
        return list(caps)
    floors = [min(floor, cap) for cap in caps]
    free = [cap - low for cap, low in zip(caps, floors, strict=True)]
    rest = total - sum(floors)
    shares = water_fill(weights, rest, free)
    rounded = [math.floor(share) for share in shares]
    remainders = [share - low for share, low in zip(shares, rounded, strict=True)]
    raised = rounded_up(rounded, remainders, free, rest)
    return [low + share for low, share in zip(floors, raised, strict=True)]


def water_fill(
    weights: Sequence[float | Fraction], rest: int, free: Sequence[int]
) -> list[Fraction]:
    """Return the exact shares of step 2: in proportion, then evenly for layers of weight 0."""
    x = [Fraction(0)] * len(weights)
    for shares in (weights, [1] * len(weights)):
        active = [i for i in range(len(free)) if shares[i] > 0 and x[i] < free[i]]
        left = rest - sum(x)
        while active and left > 0:
            level = Fraction(left) / sum(Fraction(shares[i]) for i in active)
            full = [i for i in active if level * Fraction(shares[i]) >= free[i]]
            if not full:
                for i in active:
                    x[i] = level * Fraction(shares[i])
                return x
            for i in full:
                x[i] = Fraction(free[i])
                left -= free[i]
            active = [i for i in active if i not in full]
    return x


def rounded_up(
    rounded: Sequence[int],
    remainders: Sequence[int | Fraction],
    caps: Sequence[int],
    total: int,
) -> list[int]:
    """Return `rounded` with sum `total`: ones go to the largest remainders of layers not full."""
    out = list(rounded)
    order = sorted(range(len(out)), key=lambda i: (-remainders[i], i))
    while sum(out) < min(total, sum(caps)):
        for i in order:
            if sum(out) < total and out[i] < caps[i]:
                out[i] += 1
    return out


def pages_of(
    tokens: Sequence[int],
    pages: int,
    page_tokens: int,
    tail: int,
    floor_pages: int,
    max_pages: Sequence[int],
) -> list[int]:
    """Return `round_to_pages` of one row."""
    least = floor_pages * page_tokens
    paged = [
        min(max(n - tail, least), cap * page_tokens)
        for n, cap in zip(tokens, max_pages, strict=True)
    ]
    full = [n // page_tokens for n in paged]
    if sum(full) > pages:
        return apportioned([max(n - least, 0) for n in paged], pages, max_pages, floor_pages)
    return rounded_up(full, [n % page_tokens for n in paged], max_pages, pages)


def _preference(value: float, tau: float) -> float:
    return value ** (1 / tau) if value > 0 else 0.0


def _expanded(x: int | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(x).expand(like.shape) if isinstance(x, int) or x.numel() == 1 else x


def _rows(x: torch.Tensor) -> list[list[Any]]:
    rows: list[list[Any]] = x.reshape(-1, x.shape[-1]).tolist()
    return rows


def _stacked(like: torch.Tensor, row: Callable[[int], list[int]]) -> torch.Tensor:
    rows = [row(index) for index in range(like.numel() // like.shape[-1])]
    return torch.tensor(rows, dtype=torch.int64).view(like.shape)
