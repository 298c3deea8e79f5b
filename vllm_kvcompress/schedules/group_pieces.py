"""Plans that add packed pages in k4v3 to a request, and when a prompt in pieces does so.

Here, to pack tokens is to quantise them in groups of 64 (`kvcompress_kernels.k4v3`). No token is
dropped, and no group is quantised twice: each packing adds pages for the tokens since the last one.
So lengths alone decide everything, and nothing is scored.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.schedules.kv_footprint import KVFootprint, PlanAt
from vllm_kvcompress.settings.config import CompressionConfig


def added_pages_plan(footprint: KVFootprint, tokens: int, page_tokens: int) -> PagePlan | None:
    """Return the plan that packs the unpacked tokens that fill whole pages, or None if none do.

    The rest of them stays in ordinary blocks.

    Args:
        footprint: footprint of the request.
        tokens: tokens computed so far, a multiple of the block size.
        page_tokens: tokens in a packed page.
    """
    start = footprint.first_block * footprint.block_size
    pages = (tokens - start) // page_tokens
    added = pages * page_tokens
    if not pages:
        return None
    return PagePlan(
        num_layers=footprint.num_layers,
        tokens=added,
        block_size=footprint.block_size,
        window=0,
        budget=added,
        pages=footprint.pages + footprint.num_layers * pages,
        computed=start + added,
        packed_page_tokens=page_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPieceSchedule:
    """The schedule of a prompt that is packed in k4v3 piece by piece during its prefill.

    Boundaries are the multiples of `piece` and the prompt's end, whatever chunks the scheduler
    makes. At each boundary, the tokens that fill whole pages are packed. At the prompt's end all
    its full blocks are packed, and the last page may be partly filled. A prompt then holds the
    same pages as if it had been packed at once. But its later tokens were computed from quantised
    ones.

    Args:
        settings: settings of the method, with `max_whole` and a budget that keeps every token.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        tokens: tokens of the entire prefill, S.
        page_tokens: tokens in a packed page.
        spans: protected spans of the prompt, for reports.
    """

    settings: CompressionConfig
    num_layers: int
    block_size: int
    tokens: int
    page_tokens: int
    spans: Spans = ()

    in_pieces: ClassVar[bool] = True
    adds_groups: ClassVar[bool] = True
    keeps_all_tokens: ClassVar[bool] = True
    boundary_limit: ClassVar[None] = None
    """None: packing between pieces drops no token, so no page limit applies."""

    @property
    def first_end(self) -> int:
        """Return how many tokens are computed by the first packing; at most the whole prompt."""
        piece = self.settings.pieces.length
        return min(-(-self.page_tokens // piece) * piece, self.tokens)

    def longest_prefix_hit(self, max_tokens: int) -> int:
        """Return how many tokens may come from the prefix cache.

        Tokens after the first packing are computed from quantised ones. Blocks that this packing
        leaves unpacked must not be shared, because later ones are packed in place.
        """
        whole_pages = self.first_end // self.page_tokens * self.page_tokens
        return min(whole_pages, self.first_end - 1, max_tokens)

    def next_end(self, computed: int) -> int:
        """Return where a chunk that starts after `computed` tokens must end at the latest."""
        piece = self.settings.pieces.length
        return min((computed // piece + 1) * piece, self.tokens)

    def step_limit(self, plan_at: PlanAt, computed: int, max_tokens: int) -> tuple[int, Literal[0]]:
        """Return the tokens of a chunk that starts after `computed` tokens, and 0 probe tokens."""
        return min(self.next_end(computed) - computed, max_tokens), 0

    def before_lookahead(self) -> "GroupPieceSchedule":
        """Return this schedule: no look-ahead packs the end of a prompt that keeps all tokens."""
        return self

    def plan(self, footprint: KVFootprint, tokens: int) -> PagePlan | None:
        """Return the page plan to apply after a step that ends with `tokens` computed, or None.

        The plan for the prompt's end has the tokens and pages of the entire prompt. Any other plan
        has the tokens that it adds.
        """
        if tokens == self.tokens:
            return PagePlan(
                num_layers=self.num_layers,
                tokens=tokens,
                block_size=self.block_size,
                window=0,
                budget=tokens,
                pages=self.num_layers * -(-self._last_packed_end // self.page_tokens),
                spans=self.spans,
                packed_page_tokens=self.page_tokens,
            )
        if tokens > self.tokens or tokens % self.settings.pieces.length:
            return None
        return added_pages_plan(footprint, tokens, self.page_tokens)

    @property
    def max_blocks(self) -> int:
        """Return the maximum blocks of the prompt until its end is packed, if packed in place."""
        # A page has the tokens of `ratio` blocks. After so many boundaries, the number of unpacked
        # blocks repeats with more packed pages, so the last boundaries hold the most blocks.
        ratio, piece = -(-self.page_tokens // self.block_size), self.settings.pieces.length
        last = (self.tokens - 1) // piece
        ends = (index * piece for index in range(max(last - ratio, 0) + 1, last + 1))
        return max(self.blocks_at_end, *map(self._blocks_at, ends))

    @property
    def blocks_at_end(self) -> int:
        """Return the blocks that the prompt holds when its prefill ends, if packed in place."""
        return self._blocks_at(self.tokens)

    def _blocks_at(self, tokens: int) -> int:
        """Return the blocks held when `tokens` are computed, before they are packed."""
        piece = self.settings.pieces.length
        pages = (tokens - 1) // piece * piece // self.page_tokens
        return pages - (-(tokens - pages * self.page_tokens) // self.block_size)

    @property
    def _last_packed_end(self) -> int:
        """Return the prompt tokens in full blocks, which are all packed in the end."""
        return self.tokens // self.block_size * self.block_size
