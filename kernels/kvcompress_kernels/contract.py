"""What every op holds its caller to, and which of its implementations runs.

Key and value pages come as strided views of one page array, whatever their layout in memory:
``key_pages [N, Hkv, D, block_size]`` and ``value_pages [N, Hkv, block_size, D]``. A page id is
an index into their first axis. Page ids are not range-checked: checking them would sync.

A quantised cache comes in its own dtype, float8_e4m3fn or float8_e5m2, not as bytes. Its values
are read as that dtype says; the scale that a layer's K or V was divided by is the caller's.
"""

import torch


def require(ok: bool, op: str, rule: str, got: object) -> None:
    """Raise ``ValueError`` with one sentence unless `ok`."""
    if not ok:
        raise ValueError(f"{op}: {rule}; got {got}")


def check_floats(op: str, name: str, pages: torch.Tensor) -> None:
    """Raise ``ValueError`` for a quantised cache as vLLM allocates it: bytes are not its values."""
    ok = pages.is_floating_point()
    require(ok, op, f"{name} must be floats: view a quantised cache as its float8", pages.dtype)


def check_pages(op: str, pages: torch.Tensor, tokens: int, block: int, *rows: int) -> None:
    """Raise ``ValueError`` unless `pages` are as many as `tokens` need, for each of `rows`."""
    want = (*rows, -(-tokens // block))
    require(pages.shape == want, op, f"pages must be {list(want)}", tuple(pages.shape))


def triton_takes(tensor: torch.Tensor) -> bool:
    """Whether an op on `tensor` runs its Triton kernels; its CPU form runs everywhere else."""
    return tensor.is_cuda
