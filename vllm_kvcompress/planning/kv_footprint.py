"""What one request holds in the pool, as the schedules of its packing count it."""

from dataclasses import dataclass

from vllm_kvcompress.methods.page_plan import PagePlan


@dataclass(slots=True, kw_only=True)
class KVFootprint:
    """What one request holds: pages that its layers divide, then ordinary blocks.

    Args:
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        pages: packed over all layers; 0 while nothing is.
        first_block: index of the first ordinary block.
        most_pages: packed pages that no layer exceeds.
        frozen: layers keep their counts from now on.
        settled: tokens of the request before this; of the later ones nothing was dropped.
    """

    num_layers: int
    block_size: int
    pages: int = 0
    first_block: int = 0
    most_pages: int = 0
    frozen: bool = False
    settled: int = 0

    def pages_at(self, blocks: int) -> int:
        """Pages over all layers once the request has so many blocks in vLLM's count."""
        return self.pages + self.num_layers * (blocks - self.first_block)

    def most_tokens(self, tokens: int) -> int:
        """Tokens that no layer exceeds once `tokens` of the request are computed."""
        return tokens + (self.most_pages - self.first_block) * self.block_size

    def pack(self, plan: PagePlan, blocks: int, *, freeze: bool = False) -> None:
        """Take in that the first `blocks` in vLLM's count were packed by `plan`."""
        if not self.frozen:
            self.most_pages = plan.most_pages
        self.pages, self.first_block, self.settled = plan.pages, blocks, plan.settled
        self.frozen = self.frozen or freeze
