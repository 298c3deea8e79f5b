"""Prompts in pages, as kernels get them; and how much memory an op took."""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


def shuffled(tokens: int, block: int, *, seed: int, spare: int) -> tuple[torch.Tensor, int]:
    """A prompt's pages in random order, and how many pages there are with the unused ones."""
    count = -(-tokens // block)
    order = np.random.RandomState(seed).permutation(count + spare)
    return torch.from_numpy(order[:count].copy()), count + spare


def paged_keys(k, block, *, seed=0, spare=3, dtype=torch.float32, interleave=False):
    """Keys ``[Hkv, S, D]`` in pages, NaN in all that must not be read: (key_pages, pages)."""
    heads, tokens, dim = k.shape
    pages, count = shuffled(tokens, block, seed=seed, spare=spare)
    if interleave:  # [N, block, Hkv, 2 * D]: the keys of one token lie beside its values
        store = torch.full((count, block, heads, 2 * dim), torch.nan, dtype=dtype)
        view = store[..., :dim].permute(0, 2, 3, 1)
    else:
        view = torch.full((count, heads, dim, block), torch.nan, dtype=dtype)
    for j in range(tokens):
        view[pages[j // block], :, :, j % block] = k[:, j].to(dtype)
    return view, pages


def paged_values(v, block, *, seed=0, spare=3, dtype=torch.float32, interleave=False):
    """Values ``[Hkv, S, D]`` in pages, NaN in all that must not be read: (value_pages, pages)."""
    heads, tokens, dim = v.shape
    pages, count = shuffled(tokens, block, seed=seed, spare=spare)
    if interleave:  # the values of one token lie beside its keys
        store = torch.full((count, block, heads, 2 * dim), torch.nan, dtype=dtype)
        view = store[..., dim:].transpose(1, 2)
    else:
        view = torch.full((count, heads, block, dim), torch.nan, dtype=dtype)
    for j in range(tokens):
        view[pages[j // block], :, j % block] = v[:, j].to(dtype)
    return view, pages


class Largest(TorchDispatchMode):
    """Bytes of the largest storage any operator returned."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes())
        return out
