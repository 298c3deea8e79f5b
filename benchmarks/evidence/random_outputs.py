"""Scores that keep a prompt and drop output tokens at random."""

import torch

REDRAW, UNIFORM = "redraw", "uniform"
"""How output tokens are drawn: anew among the held ones at each packing, so that older tokens
thin out, or as a uniform sample of the output so far."""

_MASK = 2**32 - 1


def random_numbers(seed: int, layers: int, heads: int, slots: int, computed: int) -> torch.Tensor:
    """Return ``[layers, heads, slots]`` float32 in [0, 1), a hash of the arguments and each index.

    Args:
        computed: tokens computed so far, so that each packing draws other numbers.
    """
    numbers = torch.full((1, 1, 1), _mixed(seed))
    for values in (
        torch.tensor(computed).view(1, 1, 1),
        torch.arange(layers).view(-1, 1, 1),
        torch.arange(heads).view(1, -1, 1),
        torch.arange(slots).view(1, 1, -1),
    ):
        numbers = _mixed_tensor(numbers ^ _mixed_tensor(values + 0x9E3779B9))
    return (numbers >> 8).float() / 2**24


def _mixed(value: int) -> int:
    return int(_mixed_tensor(torch.tensor(value)))


def _mixed_tensor(x: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3's 32-bit finalizer of int64 values."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def output_scores(
    kind: str,
    prompt_slots: torch.Tensor,
    numbers: torch.Tensor,
    *,
    sampled_slots: int,
    sampled_share: float,
) -> torch.Tensor:
    """Return ``[layers, heads, slots]`` scores: +inf for the prompt, random ones for the output.

    Args:
        kind: REDRAW or UNIFORM.
        prompt_slots: ``[layers]`` slots of each layer that hold the prompt's kept tokens.
        numbers: result of `random_numbers`.
        sampled_slots: slots after the prompt's that hold the output tokens kept so far.
        sampled_share: their share of the output tokens that were computed when they were drawn.
    """
    slot = torch.arange(numbers.shape[2])
    first = prompt_slots[:, None, None]
    if kind == UNIFORM:
        # Tokens that were sampled before had numbers in the upper part of [0, 1).
        is_sampled = (slot >= first) & (slot < first + sampled_slots)
        numbers = numbers.where(~is_sampled, 1 - sampled_share * (1 - numbers))
    return numbers.where(slot >= first, torch.inf)
