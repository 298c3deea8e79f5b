"""Use CPU_ATTN's AMX layout on a CPU without AMX, or its vector layout on a CPU with AMX.

vLLM's kernel that writes the AMX layout runs on any x86-64 CPU; the kernels that read it need AMX.
Their replacement copies the pages to the vector layout and calls the vector kernels.
"""

import functools

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn


def offsets(block: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the offsets of K and V, ``[block, dim]`` each, in their half of a page."""
    t, d = torch.arange(block)[:, None], torch.arange(dim)
    keys = t // 16 * 16 * dim + d // 2 * 32 + t % 16 * 2 + d % 2
    values = d // 16 * 16 * block + t // 2 * 32 + d % 16 * 2 + t % 2
    return keys, values


def vector_pages(half: torch.Tensor, offset: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """Return a copy of one half of all pages in the vector kernels' layout.

    Args:
        half: ``[N, Hkv, block, D]`` in the AMX layout; vLLM's shape does not describe it.
        offset: offsets of this half, ``[block, D]``.
        transposed: tokens are the innermost axis in the vector layout (K).
    """
    heads = half.as_strided(
        (*half.shape[:2], half.shape[2] * half.shape[3]),
        (*half.stride()[:2], 1),
        half.storage_offset(),
    )
    order = (offset.mT if transposed else offset).flatten()
    return heads[..., order].view(half.shape)


def pretend_no_amx(monkeypatch) -> None:
    """Let engines that start later use the vector kernels and their layout."""
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_, **__: "vec")


def pretend_amx(monkeypatch) -> None:
    """Let engines that start later use the AMX layout."""
    attend, plan = ops.cpu_attention_with_kv_cache, ops.cpu_attn_get_scheduler_metadata

    def attending(*, key_cache, value_cache, **rest):
        keys, values = offsets(*key_cache.shape[2:])
        attend(
            key_cache=vector_pages(key_cache, keys, transposed=True),
            value_cache=vector_pages(value_cache, values, transposed=False),
            **rest,
        )

    @functools.wraps(plan)  # the plugin checks the signature of this vLLM hook
    def planning(*, isa, **rest):
        assert isa == "amx", "the layers write AMX tiles, so the plan must be for the AMX kernels"
        return plan(isa="vec", **rest)

    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_, **__: "amx")
    monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", attending)
    monkeypatch.setattr(ops, "cpu_attn_get_scheduler_metadata", planning)
