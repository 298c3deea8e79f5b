"""When a prompt that never stands whole is packed, and to how many pages: from lengths alone."""

from dataclasses import dataclass, replace

from vllm_kvcompress.methods.budget_spec import BudgetSpec
from vllm_kvcompress.methods.page_plan import PagePlan, pages_kept, with_room_for_protected
from vllm_kvcompress.methods.presets import least_window
from vllm_kvcompress.methods.spans import Spans, count_before
from vllm_kvcompress.planning.kv_footprint import KVFootprint
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import allocator_rows, method_of, probe_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryPiece:
    """A prompt that never stands whole: it is packed while it is computed.

    Boundaries are the multiples of `piece` and the prompt's end, whatever chunks the scheduler
    makes. At each, a prompt that holds more pages than it may is packed (CAOTE section 2 evicts so,
    in blocks of 128). At its end it is packed to its budget; before that it may hold what leaves
    room for a piece and its probe within `max_whole`, which is more where the budget is small:
    what is dropped inside can never be asked for, and what is held until the end can.

    What a piece says of the question is little, and the question is known: so the chunk that ends
    at a boundary has the prompt's first and last tokens behind it, as its probe, whose queries
    judge (FINCH, Corallo and Papotti 2024, arXiv:2408.00167, puts the question behind every
    chunk). They attend to what is held, and are computed again in their own place.

    Args:
        settings: what packs it, with `max_whole`.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        tokens: of the whole prefill, S.
        packs_end: whether the prompt's end is a boundary; a look-ahead packs it later.
        spans: what of the prompt is protected. From the first boundary on it has room for all.
    """

    settings: CompressionConfig
    num_layers: int
    block_size: int
    tokens: int
    packs_end: bool = True
    spans: Spans = ()

    @property
    def first_end(self) -> int:
        """Tokens that are computed when it is packed for the first time: the end, if not before."""
        piece = self.settings.piece
        held_whole = self.held_pages * self.block_size // self.num_layers
        return min((held_whole // piece + 1) * piece, self.tokens)

    def next_end(self, computed: int) -> int:
        """Where a chunk must end at the latest that starts behind `computed` tokens."""
        piece = self.settings.piece
        return min((computed // piece + 1) * piece, self.tokens)

    def probe(self, end: int) -> int:
        """Rows behind a chunk that ends at a boundary and is packed; 0 where its own tokens judge.

        Those are so few tokens of the prompt's end, or fewer where only fewer are left: what a step
        computes must end before the prompt does, or a token would be sampled. Where fewer are left
        than an observation window has, they may be a chat template's alone, and the question lies
        in the piece: so its own last tokens judge.

        Where something is protected, a probe of fewer tokens than that window judges nothing: at
        the prompt's end the window must lie behind all that was packed before.
        """
        probe, window = probe_tokens(self.settings), self._budget.window
        rows = min(probe, self.tokens - end - 1)
        least = max(window if self.spans else min(probe, window), self._least_window)
        return rows if rows >= least else 0

    @property
    def _least_window(self) -> int:
        return least_window(method_of(self.settings).reads)

    def chunk(self, footprint: KVFootprint, computed: int, room: int) -> tuple[int, int]:
        """Tokens of the chunk that starts behind `computed`, and rows of the probe behind them.

        Where a step has no room for the probe too, it ends before the boundary. So what judges does
        not depend on what else is computed.

        Args:
            room: rows that the step has.
        """
        end = self.next_end(computed)
        probe = 0 if self.plan(footprint, end) is None else self.probe(end)
        if room >= end - computed + probe:
            return end - computed, probe
        return min(room, end - computed - int(probe > 0)), 0

    def plan(self, footprint: KVFootprint, tokens: int) -> PagePlan | None:
        """How a step that ends with `tokens` computed is followed by packing; None if it is not.

        It must end at a boundary and leave more than may be held; the prompt's end, where it is
        one, always packs, to what the budget and the tail leave.
        """
        ends = tokens == self.tokens and self.packs_end
        if not ends and (tokens == self.tokens or tokens % self.settings.piece):
            return None
        blocks, rest = divmod(tokens, self.block_size)
        tail = rest if ends else 0
        prompt, probe = self._budget if ends else self._inside, self.probe(tokens)
        pages = pages_kept(prompt, tail, self.block_size) if ends else self.held_pages
        if footprint.pages_at(blocks) <= pages and not ends:
            return None
        total = prompt.total
        if probe and total is not None:
            total += self.num_layers * probe
        plan = PagePlan(
            num_layers=self.num_layers,
            tokens=footprint.most_tokens(blocks * self.block_size) + tail + probe,
            block_size=self.block_size,
            window=probe or prompt.window,
            budget=prompt.budget + probe,
            pages=pages,
            total=total,
            probe=probe,
            allocator_window=allocator_rows(self.settings, probe),
            spans=self.spans,
            computed=tokens,
        )
        if not ends:
            return plan
        # no more than between its pieces, which room is set aside for
        most = min(footprint.pages_at(blocks), self.held_pages)
        return with_room_for_protected(plan, most, full_share=self.settings.full_share)

    @property
    def most_blocks(self) -> int:
        """Blocks that the prompt holds at most until its end is packed, in its own blocks."""
        first, size, piece = self.first_end, self.block_size, self.settings.piece
        if first == self.tokens:
            return -(-first // size)
        kept, behind = -(-self.held_pages // self.num_layers), self.tokens - first
        always_kept = first // size - (-self.probe(first) // size)
        if behind <= piece:
            return max(always_kept, kept - (-behind // size))
        return max(always_kept, kept + piece // size - (-self.probe(first + piece) // size))

    @property
    def ending(self) -> int:
        """Blocks that the prompt holds when its prefill ends, in its own blocks."""
        last = (self.tokens - 1) // self.settings.piece * self.settings.piece
        if last < self.first_end:
            return -(-self.tokens // self.block_size)
        kept = -(-self.held_pages // self.num_layers)
        return kept - (-(self.tokens - last) // self.block_size)

    @property
    def held_pages(self) -> int:
        """Pages over all layers that it may hold at a boundary inside."""
        return pages_kept(self._inside, 0, self.block_size)

    @property
    def protects_too_much(self) -> bool:
        """Whether what is protected, its window and a page more is above `held_pages`."""
        return self._protecting(self._unprotected).budget > self._unprotected.budget

    @property
    def without_protected(self) -> int:
        """`held_pages` if nothing were protected."""
        return pages_kept(self._unprotected, 0, self.block_size)

    @property
    def roomy(self) -> int:
        """The least `max_whole` with which it may hold twice its budget at a boundary inside."""
        return -(-2 * self._budget.budget // self.block_size) * self.block_size + self._beside

    @property
    def _beside(self) -> int:
        """Tokens of the blocks that a piece and its probe take beside what is held."""
        probe = -(-probe_tokens(self.settings) // self.block_size)
        return self.settings.piece + probe * self.block_size

    @property
    def _budget(self) -> BudgetSpec:
        """What it may keep once it has ended."""
        return self.settings.prompt(self.num_layers, self.tokens)

    @property
    def _inside(self) -> BudgetSpec:
        """What it may hold at a boundary inside: at least its budget."""
        return self._protecting(self._unprotected)

    @property
    def _unprotected(self) -> BudgetSpec:
        budget, settings, size = self._budget, self.settings, self.block_size
        assert settings.max_whole is not None
        held = (settings.max_whole - self._beside) // size * size
        return replace(budget, budget=held, total=None) if held > budget.budget else budget

    def _protecting(self, prompt: BudgetSpec) -> BudgetSpec:
        """What may be held, raised to what is protected, the window and a page more."""
        protected, size = count_before(self.spans, self.tokens), self.block_size
        least = (-(-(prompt.window + protected) // size) + 1) * size
        if not protected or pages_kept(prompt, 0, size) * size >= self.num_layers * least:
            return prompt
        return replace(prompt, budget=least, total=None)


def pieces_of(
    settings: CompressionConfig, num_layers: int, block_size: int, tokens: int, spans: Spans = ()
) -> EveryPiece | None:
    """How a prefill of `tokens` goes piecewise; None where it stands whole.

    It is no longer than `max_whole`, or comes to its end before it holds more than it may keep.
    """
    if settings.max_whole is None or tokens <= settings.max_whole:
        return None
    pieces = EveryPiece(
        settings=settings,
        num_layers=num_layers,
        block_size=block_size,
        tokens=tokens,
        spans=spans,
    )
    return None if pieces.first_end == tokens else pieces
