"""Paged test caches in random page order, layouts of pages, and a measure of an op's memory."""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompress_kernels.packed_attention import Offsets


def shuffled_pages(tokens: int, block: int, *, seed: int, spare: int) -> tuple[torch.Tensor, int]:
    """Return a prompt's pages in random order, and the number of pages including `spare` ones."""
    count = -(-tokens // block)
    order = np.random.RandomState(seed).permutation(count + spare)
    return torch.from_numpy(order[:count].copy()), count + spare


def paged_keys(k, block, **options):
    """Store keys ``[Hkv, S, D]`` in pages, and return (key_pages, pages); options as `_paged`."""
    slots, pages = _paged(k, block, of_keys=True, **options)
    return slots.mT, pages


def paged_values(v, block, **options):
    """Store values ``[Hkv, S, D]`` in pages, and return (value_pages, pages); as `_paged`."""
    return _paged(v, block, of_keys=False, **options)


def paged_cache(k, v, block, **options):
    """Store keys and values in the same pages, and return (key_pages, value_pages, pages)."""
    keys, pages = paged_keys(k, block, **options)
    return keys, paged_values(v, block, **options)[0], pages


def _paged(x, block, *, of_keys, seed=0, spare=3, dtype=torch.float32, interleave=False):
    """Store ``[Hkv, S, D]`` in pages, and return (slots ``[N, Hkv, block, D]``, pages).

    Unused slots and pages hold NaN. `interleave` stores each token's key next to its value.
    Otherwise keys lie transposed.
    """
    heads, tokens, dim = x.shape
    pages, count = shuffled_pages(tokens, block, seed=seed, spare=spare)
    if interleave:  # [N, block, Hkv, 2 * D]
        store = torch.full((count, block, heads, 2 * dim), torch.nan, dtype=dtype).transpose(1, 2)
        slots = store[..., :dim] if of_keys else store[..., dim:]
    elif of_keys:
        slots = torch.full((count, heads, dim, block), torch.nan, dtype=dtype).mT
    else:
        slots = torch.full((count, heads, block, dim), torch.nan, dtype=dtype)
    for j in range(tokens):
        slots[pages[j // block], :, j % block] = x[:, j].to(dtype)
    return slots, pages


def paged_rows(paged, x, block, **options):
    """Store rows ``[N, Hkv, S, D]`` with `paged_keys` or `paged_values`, and return (cache, pages).

    The pages ``[N, ceil(S / block)]`` are part of a wider table, whose other page ids are invalid.
    """
    rows, heads, tokens, dim = x.shape
    width = -(-tokens // block)
    padded = torch.full((heads, rows, width * block, dim), torch.nan, dtype=x.dtype)
    padded[:, :, :tokens] = x.transpose(0, 1)
    cache, pages = paged(padded.flatten(1, 2), block, **options)
    table = torch.full((rows, width + 3), len(cache) + 1000)
    table[:, :width] = pages.view(rows, width)
    return cache, table[:, :width]


def amx_tiles(block, dim):
    """Return the offsets of AMX tiles, as in vllm_kvcompress/engine/pages/layouts.py."""
    t, d = torch.arange(block, dtype=torch.int32), torch.arange(dim, dtype=torch.int32)
    return Offsets(
        t // 16 * 16 * dim + t % 16 * 2,
        d // 2 * 32 + d % 2,
        block * dim + t // 2 * 32 + t % 2,
        d // 16 * 16 * block + d % 16 * 2,
    )


def transposed_keys(block, dim):
    """Return the offsets of K with its tokens side by side, and of V in rows, as in CPU_ATTN."""
    t, d = torch.arange(block, dtype=torch.int32), torch.arange(dim, dtype=torch.int32)
    return Offsets(t, d * block, block * dim + t * dim, d)


class LargestStorage(TorchDispatchMode):
    """Record the bytes of the largest storage that any operator returned."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes())
        return out
