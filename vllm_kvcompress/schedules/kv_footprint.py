"""The pages and blocks that one request holds, as its packing schedules count them."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_kvcompress.methods.page_plan import PagePlan

PlanAt = Callable[[int], PagePlan | None]
"""Returns the page plan to apply after a step that ends with so many tokens computed, or None."""


@dataclass(slots=True, kw_only=True)
class KVFootprint:
    """What one request holds: packed pages that its layers divide, and ordinary blocks.

    Args:
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        pages: packed pages over all layers; 0 before the first packing.
        first_block: index of the first ordinary block behind the packed tokens.
        max_layer_pages: packed pages that no layer exceeds.
        frozen: layers keep their page counts from now on.
        intact_from: index of the request's token from which on nothing was dropped.
        leading_blocks: ordinary blocks before the packed tokens, which are never packed.
        draft_layers: layers of a draft model, which keep every token in packed pages of their own.
    """

    num_layers: int
    block_size: int
    pages: int = 0
    first_block: int = 0
    max_layer_pages: int = 0
    frozen: bool = False
    intact_from: int = 0
    leading_blocks: int = 0
    draft_layers: int = 0

    def __post_init__(self) -> None:
        self.first_block = max(self.first_block, self.leading_blocks)

    def pages_at(self, blocks: int) -> int:
        """Return the pages over all layers once the request has `blocks` blocks in vLLM's count."""
        return self.pages + self.num_layers * (blocks - self.first_block)

    @property
    def packed_blocks(self) -> int:
        """Return the blocks that hold the packed pages."""
        draft_pages = self.draft_layers * (self.first_block - self.leading_blocks)
        return -(-(self.pages + draft_pages) // (self.num_layers + self.draft_layers))

    def max_layer_tokens(self, tokens: int) -> int:
        """Return the tokens that no layer exceeds once `tokens` of the request are computed."""
        return tokens + (self.max_layer_pages - self.first_block) * self.block_size

    def adopt(self, pages: int, tokens: int) -> None:
        """Record that a new request begins with `pages` packed pages of each layer.

        Args:
            tokens: tokens of the request before the first one that is not packed.
        """
        self.pages, self.max_layer_pages = self.num_layers * pages, pages
        self.first_block = tokens // self.block_size

    def pack(self, plan: PagePlan, blocks: int, *, freeze: bool = False) -> None:
        """Record that the first `blocks` blocks in vLLM's count were packed as in `plan`."""
        if not self.frozen:
            self.max_layer_pages = plan.max_layer_pages
        self.pages, self.first_block, self.intact_from = plan.pages, blocks, plan.intact_from
        self.frozen = self.frozen or freeze
