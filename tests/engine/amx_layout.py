"""CPU_ATTN's AMX layout on a processor without AMX, and its vector layout on one with it.

vLLM's kernel that writes the layout runs on any x86-64; those that read it do not. Their stand-in
lays the pages out as the vector kernels want them, by the formulas, and calls these.
"""

import functools

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn


def offsets(block: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[block, dim]`` each: where K and V of token t, dim d lie in their half of a page."""
    t, d = torch.arange(block)[:, None], torch.arange(dim)
    keys = t // 16 * 16 * dim + d // 2 * 32 + t % 16 * 2 + d % 2
    values = d // 16 * 16 * block + t // 2 * 32 + d % 16 * 2 + t % 2
    return keys, values


def vector_pages(half: torch.Tensor, offset: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """A copy of one half of all pages in the layout of the vector kernels.

    Args:
        half: ``[N, Hkv, block, D]`` as vLLM hands it on: a shape that says nothing of the layout.
        transposed: tokens are the innermost axis there (K).
    """
    heads = half.as_strided(
        (*half.shape[:2], half.shape[2] * half.shape[3]),
        (*half.stride()[:2], 1),
        half.storage_offset(),
    )
    order = (offset.mT if transposed else offset).flatten()
    return heads[..., order].view(half.shape)


def pretend_no_amx(monkeypatch) -> None:
    """Every engine that starts from now on has the vector kernels and their layout."""
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_, **__: "vec")


def pretend_amx(monkeypatch) -> None:
    """Every engine that starts from now on has the AMX layout."""
    attend, plan = ops.cpu_attention_with_kv_cache, ops.cpu_attn_get_scheduler_metadata

    def attending(*, key_cache, value_cache, **rest):
        keys, values = offsets(*key_cache.shape[2:])
        attend(
            key_cache=vector_pages(key_cache, keys, transposed=True),
            value_cache=vector_pages(value_cache, values, transposed=False),
            **rest,
        )

    @functools.wraps(plan)  # its parameters are a hook that is checked
    def planning(*, isa, **rest):
        assert isa == "amx", "the layers write tiles: the plan must be for the same kernels"
        return plan(isa="vec", **rest)

    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_, **__: "amx")
    monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", attending)
    monkeypatch.setattr(ops, "cpu_attn_get_scheduler_metadata", planning)
