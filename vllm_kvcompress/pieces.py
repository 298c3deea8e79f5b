"""A prompt that never stands whole: when it is packed while it is computed, from lengths alone.

Boundaries are the multiples of `piece` and the prompt's end, whatever chunks the scheduler makes.
At each, a prompt that holds more pages than it may is packed to what the whole prompt may keep. So
what it holds never exceeds that and one piece (CAOTE section 2 evicts so, in blocks of 128).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import PagePlan, pages_kept
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import largest_budgets


@dataclass(slots=True, kw_only=True)
class Pieces:
    """A prefill that is packed piece by piece.

    Args:
        settings: what packs it, with `max_whole`.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        tokens: of the whole prefill, S.
        pages: pages packed over all layers.
        first_block: index of its first ordinary block.
        most_pages: pages that no layer exceeds among the packed ones.
    """

    settings: CompressionConfig
    num_layers: int
    block_size: int
    tokens: int
    pages: int = 0
    first_block: int = 0
    most_pages: int = 0

    @property
    def first_end(self) -> int:
        """Tokens that are computed when it is packed for the first time: the end, if not before."""
        piece = self.settings.piece
        held_whole = self._kept(0) * self.block_size // self.num_layers
        return min((held_whole // piece + 1) * piece, self.tokens)

    def next_end(self, computed: int) -> int:
        """Where a chunk must end that starts behind `computed` tokens."""
        piece = self.settings.piece
        return min((computed // piece + 1) * piece, self.tokens)

    def plan(self, tokens: int) -> PagePlan | None:
        """How a chunk that ends with `tokens` computed is followed by packing; None if it is not.

        It must end at a boundary and leave more than may be held; the prompt's end always packs,
        by then to what the tail leaves.
        """
        ends = tokens == self.tokens
        if not ends and tokens % self.settings.piece:
            return None
        blocks, rest = divmod(tokens, self.block_size)
        tail = rest if ends else 0
        pages, held = self._kept(tail), self.pages + self.num_layers * (blocks - self.first_block)
        if held <= pages and not ends:
            return None
        most = self.most_pages + blocks - self.first_block
        prompt = self.settings.prompt(self.num_layers, self.tokens)
        return PagePlan(
            num_layers=self.num_layers,
            tokens=most * self.block_size + tail,
            block_size=self.block_size,
            window=prompt.window,
            budget=prompt.budget,
            pages=pages,
            total=prompt.total,
        )

    def packed(self, plan: PagePlan, blocks: int) -> None:
        """It was packed by `plan`, when it held `blocks` in vLLM's count."""
        self.most_pages, self.pages, self.first_block = plan.most_pages, plan.pages, blocks

    def most_blocks(self) -> int:
        """Blocks that it holds at most until its end is packed, in its own blocks."""
        first, size = self.first_end, self.block_size
        if first == self.tokens:
            return -(-first // size)
        kept, behind = -(-self._kept(0) // self.num_layers), self.tokens - first
        return max(first // size, kept - (-min(self.settings.piece, behind) // size))

    def _kept(self, tail: int) -> int:
        """Pages over all layers that may be held at a boundary, `tail` tokens behind them."""
        prompt = self.settings.prompt(self.num_layers, self.tokens)
        return pages_kept(prompt, tail, self.block_size)


def pieces_of(
    settings: CompressionConfig, num_layers: int, block_size: int, tokens: int
) -> Pieces | None:
    """How a prefill of `tokens` goes piecewise; None where it stands whole.

    It is no longer than `max_whole`, or comes to its end before it holds more than it may keep.
    """
    if settings.max_whole is None or tokens <= settings.max_whole:
        return None
    pieces = Pieces(settings=settings, num_layers=num_layers, block_size=block_size, tokens=tokens)
    return None if pieces.first_end == tokens else pieces


def standing_blocks(
    settings: CompressionConfig, num_layers: int, block_size: int, longest: int
) -> int:
    """Blocks that one request takes at most while its prompt of up to `longest` is computed.

    At the budgets that the operator gave: who names a larger one may be refused.
    """
    whole = -(-longest // block_size)
    if settings.max_whole is None:
        return whole
    most = -(-min(settings.max_whole, longest) // block_size)
    for variant in _granted(settings):
        pieces = pieces_of(variant, num_layers, block_size, longest)
        most = max(most, whole if pieces is None else pieces.most_blocks())
    return min(most, whole)


def _granted(settings: CompressionConfig) -> Iterator[CompressionConfig]:
    """Every method that a request may come by, at each budget that nobody has to name."""
    for variant in settings.variants:
        for budget in largest_budgets(settings, variant.compress).granted:
            try:
                yield variant.variant(budget=budget)
            except ConfigError:
                # such a request is refused: the budget does not hold the method's window
                continue
