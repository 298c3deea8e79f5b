"""Integer budgets of all allocators, on the device (`kvcompress_kernels.apportion`)."""

import torch

from kvcompress_kernels import apportion as ops
from vllm_kvcompress.methods.page_plan import PagePlan


def apportion(
    weights: torch.Tensor,
    total: int | torch.Tensor,
    caps: int | torch.Tensor,
    floor: int = 0,
) -> torch.Tensor:
    """Return `kvcompress_kernels.apportion.apportion` of the same arguments."""
    return ops.apportion(weights, total, caps, floor)


def round_to_pages(
    tokens: torch.Tensor,
    plan: PagePlan,
    caps: torch.Tensor | None = None,
    *,
    always_kept: int = 0,
) -> torch.Tensor:
    """Return the pages per layer for token budgets, with sum exactly `plan.pages`.

    See `kvcompress_kernels.apportion.round_to_pages`.

    Args:
        tokens: ``[L]`` int64, budget of each layer n_l, without `always_kept`.
        plan: the prompt's plan.
        caps: ``[L]`` int64, pages that each layer has; None means all pages of the prompt.
        always_kept: tokens that each layer keeps in addition to `tokens`.

    Returns:
        ``[L]`` int64.
    """
    return ops.round_to_pages(
        tokens,
        pages=plan.pages,
        page_tokens=plan.page_tokens,
        tail=plan.tail - always_kept,
        floor_pages=plan.floor_pages,
        max_pages=plan.full_pages if caps is None else caps,
    )
