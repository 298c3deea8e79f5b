"""Argument checks that all ops share, and the choice between Triton and CPU code.

Key and value pages are strided views of one page array in any memory layout:
``key_pages [N, Hkv, D, block_size]`` and ``value_pages [N, Hkv, block_size, D]``. A page id is an
index into the first axis. Page ids are not range-checked, because a check would sync.

A quantised cache must be viewed as its own dtype, float8_e4m3fn or float8_e5m2, not as bytes. The
caller applies the scale that a layer's K or V was divided by.
"""

import torch


def require(ok: bool, op: str, rule: str, got: object) -> None:
    """Raise ``ValueError`` with the rule and the value received unless `ok`."""
    if not ok:
        raise ValueError(f"{op}: {rule}; got {got}")


def check_floats(op: str, name: str, pages: torch.Tensor) -> None:
    """Raise ``ValueError`` for a cache of bytes, which is how vLLM allocates a quantised cache."""
    ok = pages.is_floating_point()
    require(ok, op, f"{name} must be floats: view a quantised cache as its float8", pages.dtype)


def check_pages(op: str, pages: torch.Tensor, tokens: int, block: int, *rows: int) -> None:
    """Raise ``ValueError`` unless `pages` has shape ``[*rows, ceil(tokens / block)]``."""
    want = (*rows, -(-tokens // block))
    require(pages.shape == want, op, f"pages must be {list(want)}", tuple(pages.shape))


def check_row_pages(op: str, pages: torch.Tensor) -> None:
    """Raise ``ValueError`` unless `pages` is ``[N, W]`` with N > 0: the pages of N rows."""
    ok = pages.dim() == 2 and len(pages) > 0
    require(ok, op, "pages must be [N, W] with N > 0", tuple(pages.shape))


def runs_triton(tensor: torch.Tensor) -> bool:
    """Return whether an op on `tensor` runs its Triton kernels instead of its CPU code."""
    return tensor.is_cuda
