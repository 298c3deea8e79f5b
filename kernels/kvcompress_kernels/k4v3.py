"""The packed format k4v3: 64 tokens with 4-bit keys and 3-bit values in the bytes of 16 tokens.

To pack tokens is to quantise them in this format, and a packed page holds such tokens.

A group is up to 64 kept tokens of one layer and KV head. Keys get a scale and a minimum per channel
over the group's tokens, values per token over the head's channels:

    x ~ minimum + scale * code,    scale = (largest - minimum) / (levels - 1)

Minimum and scale are float16, rounded to nearest, and codes are computed from the rounded ones. Few
key channels are large in every token, and quantising them per token destroys the output of some
models (KIVI, Liu et al. 2024, arXiv:2402.02750). KIVI packs 2 bits in groups of 32.

The bytes of a group with head dim D, where t is the token and i counts planes:

    [0, 32 D)         key codes: byte ``t * D/2 + j``, low half channel j, high half j + D/2
    [32 D, 48 D)      low 2 bits of value codes: byte ``t * D/4 + j``, bit 2i of channel j + i * D/4
    [48 D, 56 D)      high bit of value codes: byte ``t * D/8 + j``, bit i of channel j + i * D/8
    [56 D, 58 D)      scale of each key channel, float16
    [58 D, 60 D)      minimum of each key channel
    [60 D, 60 D + 128)        scale of each token's values
    [60 D + 128, 60 D + 256)  minimum of each token's values

A group takes the bytes of ``32 / itemsize`` tokens of an ordinary page, each with
``2 * D * itemsize`` bytes. So every cache layout of vLLM can hold it, whatever lies between two
tokens. A packed page, in the bytes of `block_size` ordinary tokens, has
``block_size * itemsize / 32`` groups, which follow each other. Bytes after a group's last token and
after ``60 D + 256`` hold nothing.
"""

from typing import NamedTuple

import torch

GROUP = 64
"""Tokens of a group."""
KEY_LEVELS, VALUE_LEVELS = 16, 8
FLOAT16_MAX = 65504.0


class Group(NamedTuple):
    """The content of groups, with any leading dimensions."""

    key_codes: torch.Tensor
    """``[..., 64, D]`` uint8, at most 15."""
    key_scale: torch.Tensor
    """``[..., D]`` float16."""
    key_minimum: torch.Tensor
    """``[..., D]`` float16."""
    value_codes: torch.Tensor
    """``[..., 64, D]`` uint8, at most 7."""
    value_scale: torch.Tensor
    """``[..., 64]`` float16."""
    value_minimum: torch.Tensor
    """``[..., 64]`` float16."""


def rows_per_group(itemsize: int) -> int:
    """Return how many tokens of an ordinary page take as many bytes as a group.

    Args:
        itemsize: bytes of a cached number.
    """
    return 32 // itemsize


def page_tokens(block_size: int, itemsize: int) -> int:
    """Return how many tokens a packed page holds.

    Args:
        block_size: tokens of an ordinary page of the same size.
        itemsize: bytes of a cached number.
    """
    return block_size // rows_per_group(itemsize) * GROUP


def refusal(head_dim: int, block_size: int, itemsize: int) -> str:
    """Return why a cache cannot hold packed pages; empty if it can."""
    if head_dim < 64 or head_dim % 8:
        return (
            "k4v3 needs a head dim that is a multiple of 8 and at least 64, because the scales of a"
            f" smaller head do not fit beside its codes; this model has {head_dim}"
        )
    rows = rows_per_group(itemsize)
    if block_size % rows:
        return (
            f"k4v3 needs KV blocks of a multiple of {rows} tokens, which hold whole groups of"
            f" {GROUP}; got blocks of {block_size}"
        )
    return ""


def quantise(keys: torch.Tensor, values: torch.Tensor, tokens: int | torch.Tensor) -> Group:
    """Return the groups that hold keys and values ``[..., 64, D]``, any float dtype.

    Computes in float64 for float64 input and in float32 otherwise. A NaN gets code 0 and does not
    change the scale or minimum of other numbers. Infinities and large numbers saturate, because
    scale and minimum do. Everything is 0 where there is no number: for tokens past `tokens`, and
    for channels and tokens that hold only NaN.

    Args:
        tokens: valid tokens of each group, at least 1: an int, or an integer tensor ``[...]``.
    """
    dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
    limit = torch.as_tensor(tokens, device=keys.device)[..., None]
    valid = (torch.arange(GROUP, device=keys.device) < limit)[..., None]  # [..., 64, 1]
    keys = keys.to(dtype).masked_fill(~valid, torch.nan)
    values = values.to(dtype).masked_fill(~valid, torch.nan)
    key_scale, key_minimum = steps(*_extremes(keys, -2), KEY_LEVELS)
    value_scale, value_minimum = steps(*_extremes(values, -1), VALUE_LEVELS)
    return Group(
        _codes(keys, key_scale[..., None, :], key_minimum[..., None, :], KEY_LEVELS),
        key_scale,
        key_minimum,
        _codes(values, value_scale[..., None], value_minimum[..., None], VALUE_LEVELS),
        value_scale,
        value_minimum,
    )


def _extremes(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and largest numbers along `dim`; inf and -inf if all are NaN."""
    missing = x.isnan()
    return (
        x.masked_fill(missing, torch.inf).amin(dim),
        x.masked_fill(missing, -torch.inf).amax(dim),
    )


def steps(
    lowest: torch.Tensor, largest: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and minimum, float16; both 0 where `lowest` exceeds `largest`.

    Both saturate at the largest float16.
    """
    lowest = lowest.where(lowest <= largest, 0.0)
    minimum = lowest.clamp(-FLOAT16_MAX, FLOAT16_MAX).half()
    spread = (largest - minimum.to(largest.dtype)).clamp(min=0.0)
    return (spread / (levels - 1)).clamp(max=FLOAT16_MAX).half(), minimum


def _codes(
    x: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, levels: int
) -> torch.Tensor:
    """Return the uint8 codes of `x`; 0 for NaN and where the scale is 0."""
    step = scale.to(x.dtype)
    code = ((x - minimum.to(x.dtype)) / step.where(step > 0, 1.0) + 0.5).floor()
    return code.nan_to_num(0.0).clamp(0, levels - 1).where(step > 0, 0.0).to(torch.uint8)


def dequantise(
    group: Group, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values ``[..., 64, D]`` that groups stand for. For tests and reports."""
    keys = group.key_minimum.to(dtype)[..., None, :] + group.key_scale.to(dtype)[
        ..., None, :
    ] * group.key_codes.to(dtype)
    values = group.value_minimum.to(dtype)[..., None] + group.value_scale.to(dtype)[
        ..., None
    ] * group.value_codes.to(dtype)
    return keys, values


def to_bytes(group: Group) -> torch.Tensor:
    """Return groups as bytes ``[..., 64 * D]`` uint8."""
    codes = [
        _folded(group.key_codes, 4),
        _folded(group.value_codes & 3, 4, 2),
        _folded(group.value_codes >> 2, 4, 2, 1),
    ]
    scales = [group.key_scale, group.key_minimum, group.value_scale, group.value_minimum]
    flat = [part.flatten(-2) for part in codes]
    flat += [scale.contiguous().view(torch.uint8) for scale in scales]
    content = torch.cat(flat, -1)
    unused = GROUP * group.key_scale.shape[-1] - content.shape[-1]
    return torch.nn.functional.pad(content, (0, unused))


def _folded(codes: torch.Tensor, *shifts: int) -> torch.Tensor:
    """Halve the last axis once per shift: combine each half with the other one shifted left."""
    for shift in shifts:
        low, high = codes.chunk(2, -1)
        # `|` and `<<` would take twice as long on a CPU.
        codes = torch.add(low, high, alpha=1 << shift)
    return codes


def from_bytes(content: torch.Tensor) -> Group:
    """Return the groups in bytes ``[..., 64 * D]`` uint8, the inverse of `to_bytes`."""
    dim = content.shape[-1] // GROUP
    sizes = [32 * dim, 16 * dim, 8 * dim, 2 * dim, 2 * dim, 128, 128]
    parts = torch.split(content[..., : sum(sizes)], sizes, -1)
    keys, low, high = (part.view(*part.shape[:-1], GROUP, -1) for part in parts[:3])
    scales = [part.contiguous().view(torch.float16) for part in parts[3:]]
    low_bits = torch.cat([low >> 2 * i & 3 for i in range(4)], -1)
    high_bits = torch.cat([high >> i & 1 for i in range(8)], -1)
    return Group(
        torch.cat([keys & 15, keys >> 4], -1),
        scales[0],
        scales[1],
        low_bits | high_bits << 2,
        scales[2],
        scales[3],
    )


def read_pages(byte_pages: torch.Tensor, pages: torch.Tensor, itemsize: int) -> Group:
    """Return the groups ``[..., Hkv, groups, ...]`` in packed pages, in order.

    Args:
        byte_pages: ``[N, Hkv, block_size, 2 * D * itemsize]`` uint8, any strides.
        pages: ``[...]`` int64, indices into `byte_pages`.
    """
    content = byte_pages[pages].flatten(-2)  # [..., Hkv, bytes of a page]
    group_bytes = rows_per_group(itemsize) * byte_pages.shape[-1]
    return from_bytes(content.view(*content.shape[:-1], -1, group_bytes))
