"""What becomes of an answer as it grows: when it is packed again, from lengths alone."""

from dataclasses import dataclass

from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.settings.config import CompressionConfig


@dataclass(slots=True, kw_only=True)
class Growth:
    """A request whose memory is bounded while it decodes.

    Args:
        settings: what packs it.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        prefilled: tokens when its prefill ended; later ones leave their queries.
        last: tokens of its longest answer and its prompt.
        pages: pages packed over all layers.
        first_block: index of its first ordinary block.
        most_pages: pages that no layer exceeds among the packed ones.
        frozen: it was packed again: layers keep their counts from now on.
        added_up: tokens whose attention the workers have added up, for a method that ranks by the
            sum of all rows; None for one that does not.
    """

    settings: CompressionConfig
    num_layers: int
    block_size: int
    prefilled: int
    last: int
    pages: int = 0
    first_block: int = 0
    most_pages: int = 0
    frozen: bool = False
    added_up: int | None = None

    def prefill_packed(self, plan: PagePlan) -> None:
        """Its prompt is compressed in the step that ends its prefill."""
        self.pages, self.most_pages = plan.pages, plan.most_pages
        self.first_block = self.prefilled // self.block_size

    @property
    def floor_pages(self) -> int:
        """Pages that every layer needs: for the window, or one."""
        return max(-(-self.settings.resolved_decode_window // self.block_size), 1)

    @property
    def cap(self) -> int:
        """Pages that are held over all layers once the answer was packed again, P."""
        budget = self.settings.decode_budget
        assert budget is not None
        wanted = self.num_layers * budget // self.block_size
        return max(self.pages, wanted, self.num_layers * self.floor_pages)

    def plan(self, tokens: int) -> PagePlan | None:
        """How a step that ends with `tokens` computed is followed by packing; None if it is not.

        It must fill a block, be `decode_interval` tokens after the last time and a window after
        the prefill, leave something to read it, and hold more than it may.
        """
        size, settings = self.block_size, self.settings
        blocks, rest = divmod(tokens, size)
        window = settings.resolved_decode_window
        if rest or (blocks - self.first_block) * size < settings.decode_interval:
            return None
        # The step's own token is the next after `tokens`: another step must read what is packed.
        if tokens - self.prefilled < window or tokens + 1 >= self.last:
            return None
        if self.pages + self.num_layers * (blocks - self.first_block) <= self.cap:
            return None
        most = self.most_pages + blocks - self.first_block
        return PagePlan(
            num_layers=self.num_layers,
            tokens=most * size,
            block_size=size,
            window=window,
            budget=max(self.cap * size // self.num_layers, window + 1),
            pages=self.cap,
            total=self.cap * size,
        )

    @property
    def may_be_packed(self) -> bool:
        """Whether its longest answer holds more than it may, at a step that another one follows."""
        end = (self.last - 2) // self.block_size
        blocks = end - self.first_block
        if blocks * self.block_size < self.settings.decode_interval:
            return False
        if end * self.block_size - self.prefilled < max(self.settings.resolved_decode_window, 1):
            return False
        return self.pages + self.num_layers * blocks > self.cap

    def latest(self, tokens: int, packs: bool) -> int:
        """Queries whose attention is added up after a step that ends with `tokens` computed.

        Args:
            packs: it is packed after that step: what is dropped must have been judged by all.
        """
        if self.added_up is None:
            return 0
        latest = tokens - self.added_up
        # Queries are kept for an interval, and what blocks hold is added up when they are full.
        full = tokens % self.block_size == 0
        if packs or (full and latest + self.block_size > self.settings.decode_interval):
            self.added_up = tokens
            return latest
        return 0

    def packed(self, plan: PagePlan, blocks: int) -> None:
        """It was packed by `plan`, when it held `blocks` in vLLM's count."""
        if not self.frozen:
            self.most_pages = min(plan.full_blocks, plan.most_pages)
        self.pages, self.first_block, self.frozen = plan.pages, blocks, True


def wrong_interval(interval: int, block_size: int) -> str:
    """Why answers cannot be packed every `interval` tokens, in a sentence."""
    fits = max(interval // block_size, 1) * block_size
    return (
        "--kv-decode-interval must be a multiple of the KV block, which has"
        f" {block_size} tokens here, got {interval}; set it to {fits}"
    )


def most_blocks(growth: Growth, *, packed: int, tokens: int) -> int:
    """Blocks that a request holds at most until `tokens` of it are in the cache.

    Args:
        growth: of the request when its prefill has ended; it is moved on.
        packed: blocks that its compressed prompt was packed into, 0 without.
    """
    size, most = growth.block_size, 0
    for blocks in range(growth.prefilled // size, tokens // size + 1):
        most = max(most, packed + blocks - growth.first_block)
        plan = growth.plan(blocks * size) if blocks * size > growth.prefilled else None
        if plan is not None:
            packed = plan.blocks
            growth.packed(plan, blocks)
    return max(most, packed + -(-tokens // size) - growth.first_block)
