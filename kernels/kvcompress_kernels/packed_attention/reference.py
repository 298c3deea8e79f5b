"""Reference for `packed_attention` in float64: one softmax per query token and head."""

from collections.abc import Iterator

import torch

from kvcompress_kernels import k4v3
from kvcompress_kernels.packed_attention.offsets import Offsets

_Tokens = tuple[torch.Tensor, torch.Tensor]
"""Keys and values ``[Hkv, tokens, D]`` float64."""


def run(
    query: torch.Tensor,
    output: torch.Tensor,
    pages: torch.Tensor,
    offsets: Offsets | None,
    packed: torch.Tensor,
    packed_tokens: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_start: torch.Tensor,
    slots: torch.Tensor,
    live: torch.Tensor,
    *,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> None:
    group = query.shape[1] // pages.shape[1]
    for row in range(int(live)):
        slot, first, end = int(slots[row]), int(query_start[row]), int(query_start[row + 1])
        count, length = int(packed_tokens[slot]), int(lengths[row])
        if count == 0:
            continue
        packed_keys, packed_values = _packed(pages, packed[slot], count)
        keys, values = _ordinary(pages, offsets, tables[row], length)
        keys = torch.cat([packed_keys, keys * key_scale], 1)
        values = torch.cat([packed_values, values * value_scale], 1)
        for token in range(first, end):
            seen = count + length - (end - token) + 1
            for head in range(query.shape[1]):
                kv = head // group
                logits = scale * keys[kv, :seen] @ query[token, head].double()
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head, None].double()])
                probabilities = logits.softmax(0)[:seen]
                output[token, head] = (probabilities @ values[kv, :seen]).to(output.dtype)


def _packed(pages: torch.Tensor, row: torch.Tensor, count: int) -> _Tokens:
    """Return the packed tokens of a slot whose packed pages are `row`."""
    itemsize, block = pages.itemsize, pages.shape[2]
    used = row[: -(-count // k4v3.page_tokens(block, itemsize))].long()
    groups = k4v3.read_pages(pages.view(torch.uint8), used, itemsize)
    keys, values = (
        x.transpose(0, 1).flatten(1, 3)[:, :count]  # from [pages, Hkv, groups, 64, D]
        for x in k4v3.dequantise(groups, torch.float64)
    )
    return keys, values


def _ordinary(
    pages: torch.Tensor, offsets: Offsets | None, table: torch.Tensor, length: int
) -> _Tokens:
    """Return the stored numbers of a row's ordinary tokens."""
    block, dim = pages.shape[2], pages.shape[3] // 2
    empty = torch.zeros(pages.shape[1], 0, dim, dtype=torch.float64)
    keys, values = [empty], [empty]
    for page, used in _used(table, length, block):
        part = pages[page]
        if offsets is None:
            keys.append(part[:, :used, :dim].double())
            values.append(part[:, :used, dim:].double())
            continue
        elements = part.flatten(1).double()
        keys.append(elements[:, offsets.key_tokens[:used, None] + offsets.key_dims])
        values.append(elements[:, offsets.value_tokens[:used, None] + offsets.value_dims])
    return torch.cat(keys, 1), torch.cat(values, 1)


def _used(table: torch.Tensor, length: int, block: int) -> Iterator[tuple[int, int]]:
    """Yield each page of a row and its number of tokens."""
    for column, start in enumerate(range(0, length, block)):
        yield int(table[column]), min(block, length - start)
