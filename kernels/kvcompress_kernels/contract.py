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


def check_keys(op: str, key_pages: torch.Tensor) -> None:
    """Raise ``ValueError`` unless `key_pages` are 4-dimensional floats."""
    got = tuple(key_pages.shape)
    require(key_pages.dim() == 4, op, "key_pages must be [N, Hkv, D, bs]", got)
    check_floats(op, "key_pages", key_pages)


def check_values(op: str, value_pages: torch.Tensor) -> None:
    """Raise ``ValueError`` unless `value_pages` are 4-dimensional floats."""
    got = tuple(value_pages.shape)
    require(value_pages.dim() == 4, op, "value_pages must be [N, Hkv, bs, D]", got)
    check_floats(op, "value_pages", value_pages)


def check_same_pages(op: str, key_pages: torch.Tensor, value_pages: torch.Tensor) -> None:
    """Raise ``ValueError`` unless `value_pages` have the keys' pages, heads and block size."""
    want = (*key_pages.shape[:2], key_pages.shape[3])
    ok = value_pages.dim() == 4 and value_pages.shape[:3] == want
    rule = "value_pages must be [{}, {}, {}, D]".format(*want)
    require(ok, op, rule, tuple(value_pages.shape))


def check_pages(op: str, pages: torch.Tensor, tokens: int, block: int, *rows: int) -> None:
    """Raise ``ValueError`` unless `pages` has shape ``[*rows, ceil(tokens / block)]``."""
    want = (*rows, -(-tokens // block))
    require(pages.shape == want, op, f"pages must be {list(want)}", tuple(pages.shape))


def check_row_pages(op: str, pages: torch.Tensor, tokens: int, block: int) -> None:
    """Raise ``ValueError`` unless `pages` has the pages of N > 0 rows of `tokens` > 0 tokens."""
    ok = pages.dim() == 2 and len(pages) > 0
    require(ok, op, "pages must be [N, W] with N > 0", tuple(pages.shape))
    require(tokens > 0, op, "tokens must be positive", tokens)
    check_pages(op, pages, tokens, block, len(pages))


def check_tensor(
    op: str, name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raise ``ValueError`` unless `x` has this shape and dtype."""
    rule = f"{name} must be {list(shape)} {str(dtype).removeprefix('torch.')}"
    require(x.shape == shape and x.dtype == dtype, op, rule, (tuple(x.shape), x.dtype))


def runs_triton(tensor: torch.Tensor) -> bool:
    """Return whether an op on `tensor` runs its Triton kernels instead of its CPU code."""
    return tensor.is_cuda
