"""The whole method in one screen: statistics -> budgets -> kept positions. No vLLM."""

from collections.abc import Sequence

import torch

from vllm_kvcompress.plan import LayerStats, PagePlan
from vllm_kvcompress.policies.base import Allocator
from vllm_kvcompress.policies.budgets import round_to_pages
from vllm_kvcompress.policies.selectors import Selector


def layer_pages(
    allocator: Allocator, plan: PagePlan, stats: Sequence[LayerStats] | None
) -> list[int]:
    """Pages that each layer keeps: L ints between the window's pages and all, sum `plan.pages`."""
    past = allocator.allocate(plan.prompt, stats)
    return round_to_pages([b + plan.window for b in past], plan)


def kept_positions(
    scores: torch.Tensor, plan: PagePlan, pages: int, selector: Selector
) -> torch.Tensor:
    """Positions of the prompt's full blocks that one layer keeps in `pages` pages.

    The window's part before the tail is always kept. The tail is kept by the engine itself, so
    past tokens that lie in it do not compete.

    Args:
        scores: ``[Hkv, P]`` float32 over the past tokens.

    Returns:
        ``[Hkv, pages * block_size]`` int64, ascending.
    """
    end = plan.full_blocks * plan.block_size
    past = min(plan.prompt.past, end)
    best = selector(scores[:, :past], pages * plan.block_size - (end - past))
    window = torch.arange(past, end, device=scores.device).expand(len(scores), -1)
    return torch.cat([best, window], dim=1)
