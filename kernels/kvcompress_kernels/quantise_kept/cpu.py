"""Torch code of `quantise_kept` for a CPU: float32, tiled over the groups of all rows."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvcompress_kernels import k4v3

TILE = 1 << 20
"""Bytes of the float32 keys of one tile. Keys and values of two tiles fit in a core's cache."""


class _Page(NamedTuple):
    """The tokens of one row that a destination page holds.

    Args:
        row: the row.
        first: first token, counted in `kept`.
        end: last token plus 1.
        destination: page id.
    """

    row: int
    first: int
    end: int
    destination: int

    @property
    def group_starts(self) -> range:
        return range(self.first, self.end, k4v3.GROUP)


def run(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    kept: torch.Tensor | None,
    tokens: torch.Tensor,
    destinations: torch.Tensor,
    into: torch.Tensor,
    key_scale: float | torch.Tensor,
    value_scale: float | torch.Tensor,
) -> None:
    _, heads, dim, block = key_pages.shape
    page_tokens = k4v3.page_tokens(into.shape[2], into.shape[3] // (2 * dim))
    written = list(_pages(tokens, destinations, page_tokens))
    tile = max(TILE // (4 * heads * dim * page_tokens), 1)
    for start in range(0, len(written), tile):
        part = written[start : start + tile]
        row, head, first, end = torch.tensor(
            [
                (page.row, head, first, page.end)
                for page in part
                for head in range(heads)
                for first in page.group_starts
            ]
        ).T[:, :, None]  # [groups, 1] each
        token = first + torch.arange(k4v3.GROUP)
        past = token >= end
        # Repeating the last token fills its group without changing the key statistics.
        token = token.minimum(end - 1)
        position = token if kept is None else kept[row, head, token].long()
        at = pages[row, position // block].long(), head, position % block
        keys = _scaled(_tokens(key_pages.mT, at), key_scale, row)  # [groups, 64, D]
        values = _scaled(_tokens(value_pages, at), value_scale, row)
        content = k4v3.to_bytes(_quantised(keys, values, past)).view(-1, into.shape[3])
        for page in part:
            rows = content[: heads * len(page.group_starts) * (k4v3.GROUP * dim // into.shape[3])]
            content = content[len(rows) :]
            rows = rows.view(heads, -1, into.shape[3])
            into[page.destination, :, : rows.shape[1]] = rows


def _pages(tokens: torch.Tensor, destinations: torch.Tensor, page_tokens: int) -> Iterator[_Page]:
    """Yield all pages that are written, in order."""
    for row, (count, to) in enumerate(zip(tokens.tolist(), destinations.tolist(), strict=True)):
        for first, page in zip(range(0, count, page_tokens), to, strict=False):
            yield _Page(row, first, min(first + page_tokens, count), page)


def _tokens(part: torch.Tensor, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return a copy of the tokens `at` of ``[pages, Hkv, block_size, D]``.

    Indexing copies one number at a time, so copy words of 8 bytes where D has them.
    """
    *outer, last = part.stride()
    steps = (part.shape[-1], part.storage_offset(), *outer)
    aligned = last == 1 and not any(step * part.element_size() % 8 for step in steps)
    words = part.view(torch.int64) if aligned else part
    return words[at].view(part.dtype)


def _scaled(x: torch.Tensor, scale: float | torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return groups ``[groups, 64, D]`` in float32, times the factors of their rows."""
    x = x.float()
    if isinstance(scale, torch.Tensor):
        return x.mul_(scale[row][..., None])
    return x if scale == 1.0 else x.mul_(scale)


def _quantised(keys: torch.Tensor, values: torch.Tensor, past: torch.Tensor) -> k4v3.Group:
    """Return the groups of keys and values ``[groups, 64, D]`` float32, which it overwrites.

    Args:
        past: ``[groups, 64]`` bool: copies of a group's last token.
    """
    key_scale, key_minimum = k4v3.steps(*_extremes(keys, 1), k4v3.KEY_LEVELS)
    value_scale, value_minimum = k4v3.steps(*_extremes(values, 2), k4v3.VALUE_LEVELS)
    _replace_by_codes(keys, key_scale[:, None], key_minimum[:, None], k4v3.KEY_LEVELS)
    _replace_by_codes(values, value_scale[..., None], value_minimum[..., None], k4v3.VALUE_LEVELS)
    if bool(past.any()):
        for part in (keys, values, value_scale, value_minimum):
            part[past] = 0
    return k4v3.Group(
        _bytes(keys), key_scale, key_minimum, _bytes(values), value_scale, value_minimum
    )


def _extremes(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and largest numbers along `dim`; inf and -inf if all are NaN.

    Replaces NaN in `x` by -inf, which gets code 0.
    """
    lowest = x.amin(dim)
    if bool(lowest.isnan().any()):
        lowest = x.nan_to_num(torch.inf, torch.inf, -torch.inf).amin(dim)
        x.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
    return lowest, x.amax(dim)


def _replace_by_codes(
    x: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, levels: int
) -> None:
    """Replace numbers by their codes plus a fraction, which a conversion to integers drops."""
    step = scale.float()
    # Where the scale is 0, no number exceeds the minimum by half a step of 1.
    inverse = step.where(step > 0, 1.0).reciprocal_()
    x.sub_(minimum).mul_(inverse).add_(0.5).clamp_(0.0, levels - 1)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    # Torch has no vector code for a conversion to uint8.
    return x.to(torch.int8).view(torch.uint8)
