"""When a prompt in pieces is packed, and to how many pages, computed from lengths alone."""

from dataclasses import dataclass, replace
from typing import ClassVar

from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import BudgetSpec
from vllm_kvcompress.methods.page_plan import PagePlan, pages_kept, raise_for_protected
from vllm_kvcompress.methods.spans import Spans, count_before
from vllm_kvcompress.schedules.base import PrefillSchedule
from vllm_kvcompress.schedules.groups import GroupSchedule
from vllm_kvcompress.schedules.kv_footprint import KVFootprint, PlanAt
from vllm_kvcompress.settings.config import CompressionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSchedule(PrefillSchedule):
    """The schedule of a prompt that is compressed piece by piece during its prefill.

    Boundaries are the multiples of `piece` and the prompt's end, whatever chunks the scheduler
    makes. At each boundary, a prompt that holds more pages than its limit is packed (CAOTE section
    2 evicts in the same way, in blocks of 128). At its end it is packed to its budget. At earlier
    boundaries its limit is as large as `max_whole` allows with the next piece and its probe. That
    is more than a small budget: a token dropped mid-prompt cannot be recovered, but one that is
    held until the end can still be kept.

    A piece's own queries say little about the question, but the question is already known. So the
    chunk that ends at a boundary is followed by copies of the prompt's first and last tokens, the
    probe, and their queries score the tokens held (FINCH, Corallo and Papotti 2024,
    arXiv:2408.00167, puts the question after every chunk). The probe attends to the tokens held,
    and its tokens are computed again at their own positions.

    Args:
        settings: settings of the method, with `max_whole`.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        tokens: tokens of the entire prefill, S.
        packs_end: False if a look-ahead packs the prompt's end later.
        spans: protected spans of the prompt. From the first boundary on, the limit has space for
            all of them.
    """

    settings: CompressionConfig
    num_layers: int
    block_size: int
    tokens: int
    packs_end: bool = True
    spans: Spans = ()

    in_pieces: ClassVar[bool] = True
    keeps_all_tokens: ClassVar[bool] = False

    @property
    def first_end(self) -> int:
        """Return how many tokens are computed by the first packing; at most the whole prompt."""
        piece = self.settings.pieces.length
        max_held_tokens = self.held_pages * self.block_size // self.num_layers
        return min((max_held_tokens // piece + 1) * piece, self.tokens)

    def next_end(self, computed: int) -> int:
        """Return where a chunk that starts after `computed` tokens must end at the latest."""
        piece = self.settings.pieces.length
        return min((computed // piece + 1) * piece, self.tokens)

    def probe(self, end: int) -> int:
        """Return the number of probe rows after a chunk that ends at boundary `end`.

        They are fewer than the tokens left of the prompt: the step must end before the prompt does,
        or vLLM would sample a token. If fewer tokens are left than an observation window has, they
        may contain only the chat template, and the question is in the piece. Then the result is 0,
        and the piece's own last tokens score.

        With protected spans, a probe smaller than that window is not used: at the prompt's end, the
        window must lie after everything that was packed before.
        """
        probe, window = self.settings.method.probe_tokens, self._end_budget.window
        rows = min(probe, self.tokens - end - 1)
        min_rows = window if self.spans else min(probe, window)
        return rows if rows >= max(min_rows, self.settings.method.min_window) else 0

    def step_limit(
        self, plan_at: PlanAt, computed: int, max_tokens: int, unverified: int = 0
    ) -> tuple[int, int]:
        """Return the tokens of the chunk that starts after `computed` tokens, and its probe tokens.

        If a step has no space for the probe too, the chunk ends before the boundary. That way, the
        scoring queries do not depend on which other requests the step computes.
        """
        end = self.next_end(computed)
        probe = 0 if plan_at(end) is None else self.probe(end)
        if max_tokens >= end - computed + probe:
            return end - computed, probe
        return min(max_tokens, end - computed - int(probe > 0)), 0

    def before_lookahead(self) -> "PieceSchedule":
        """Return the schedule without the prompt's end, which a look-ahead packs."""
        return replace(self, packs_end=False)

    def longest_prefix_hit(self, max_tokens: int) -> int:
        """Return how many tokens may come from the prefix cache.

        Tokens after the first packing are computed from a compressed context. The queries that the
        method reads must be computed too.
        """
        reads = self.settings.method.reads
        if Reads.COLUMN_SUMS in reads:
            return 0
        window = self.settings.resolved_window if Reads.WINDOW in reads else 0
        to_compute = 1 if self.probe(self.first_end) else max(window, 1)
        return min(self.first_end - to_compute, self.tokens - max(window, 1), max_tokens)

    def plan(self, footprint: KVFootprint, tokens: int) -> PagePlan | None:
        """Return the page plan to apply after a step that ends with `tokens` computed, or None.

        At a boundary, a prompt is packed if it holds more pages than its limit. If the prompt's end
        is a boundary, it is always packed, to the budget.
        """
        is_end = tokens == self.tokens and self.packs_end
        if not is_end and (tokens == self.tokens or tokens % self.settings.pieces.length):
            return None
        blocks, partial = divmod(tokens, self.block_size)
        tail = partial if is_end else 0
        budget, probe = self._end_budget if is_end else self._boundary_budget, self.probe(tokens)
        pages = pages_kept(budget, tail, self.block_size) if is_end else self.held_pages
        if footprint.pages_at(blocks) <= pages and not is_end:
            return None
        total = budget.total
        if probe and total is not None:
            total += self.num_layers * probe
        plan = PagePlan(
            num_layers=self.num_layers,
            tokens=footprint.max_layer_tokens(blocks * self.block_size) + tail + probe,
            block_size=self.block_size,
            window=probe or budget.window,
            budget=budget.budget + probe,
            pages=pages,
            total=total,
            probe=probe,
            allocator_window=self.settings.method.num_allocator_queries(probe),
            spans=self.spans,
            computed=tokens,
        )
        if not is_end:
            return plan
        # Memory is reserved only for the limit between pieces.
        max_pages = min(footprint.pages_at(blocks), self.held_pages)
        return raise_for_protected(plan, max_pages, full_share=self.settings.protection.full_share)

    @property
    def max_blocks(self) -> int:
        """Return the maximum blocks of the prompt until its end is packed, if packed in place."""
        first_end, size, piece = self.first_end, self.block_size, self.settings.pieces.length
        if first_end == self.tokens:
            return -(-first_end // size)
        held, tokens_left = -(-self.held_pages // self.num_layers), self.tokens - first_end
        first_blocks = first_end // size - (-self.probe(first_end) // size)
        if tokens_left <= piece:
            return max(first_blocks, held - (-tokens_left // size))
        return max(first_blocks, held + piece // size - (-self.probe(first_end + piece) // size))

    @property
    def blocks_at_end(self) -> int:
        """Return the blocks that the prompt holds when its prefill ends, if packed in place."""
        last_boundary = (
            (self.tokens - 1) // self.settings.pieces.length * self.settings.pieces.length
        )
        if last_boundary < self.first_end:
            return -(-self.tokens // self.block_size)
        held = -(-self.held_pages // self.num_layers)
        return held - (-(self.tokens - last_boundary) // self.block_size)

    @property
    def boundary_limit(self) -> "PieceSchedule":
        """Return the schedule whose `held_pages` limits the prompt between pieces: this one."""
        return self

    @property
    def held_pages(self) -> int:
        """Return the page limit over all layers at a boundary before the end."""
        return pages_kept(self._boundary_budget, 0, self.block_size)

    @property
    def protection_too_large(self) -> bool:
        """Return whether the protected tokens, the window and one more page exceed `held_pages`."""
        return self._boundary_budget.budget > self._unprotected_budget.budget

    @property
    def unprotected_held_pages(self) -> int:
        """Return `held_pages` as it would be without protected tokens."""
        return pages_kept(self._unprotected_budget, 0, self.block_size)

    @property
    def recommended_max_whole(self) -> int:
        """Return the smallest `max_whole` with which a boundary can hold twice the budget."""
        return (
            -(-2 * self._end_budget.budget // self.block_size) * self.block_size
            + self._piece_tokens
        )

    @property
    def _piece_tokens(self) -> int:
        """Return the tokens of the blocks that a piece and its probe take."""
        probe = -(-self.settings.method.probe_tokens // self.block_size)
        return self.settings.pieces.length + probe * self.block_size

    @property
    def _end_budget(self) -> BudgetSpec:
        """Return the budget at the prompt's end."""
        return self.settings.budget_spec(self.num_layers, self.tokens)

    @property
    def _boundary_budget(self) -> BudgetSpec:
        """Return the budget at a boundary before the end, at least the end's budget."""
        return self._raise_for_protected(self._unprotected_budget)

    @property
    def _unprotected_budget(self) -> BudgetSpec:
        """Return the budget at a boundary before the end, without protected tokens."""
        budget, settings, size = self._end_budget, self.settings, self.block_size
        assert settings.pieces.max_whole is not None
        held_tokens = (settings.pieces.max_whole - self._piece_tokens) // size * size
        if held_tokens <= budget.budget:
            return budget
        return replace(budget, budget=held_tokens, total=None)

    def _raise_for_protected(self, budget: BudgetSpec) -> BudgetSpec:
        """Return the budget raised to hold the protected tokens, the window and one more page."""
        protected, size = count_before(self.spans, self.tokens), self.block_size
        min_tokens = (-(-(budget.window + protected) // size) + 1) * size
        if not protected or pages_kept(budget, 0, size) * size >= self.num_layers * min_tokens:
            return budget
        return replace(budget, budget=min_tokens, total=None)


PiecewiseSchedule = PieceSchedule | GroupSchedule
"""The schedule of a prompt in pieces, in either format of kept tokens."""


def piece_schedule(
    settings: CompressionConfig,
    num_layers: int,
    block_size: int,
    tokens: int,
    spans: Spans = (),
    page_tokens: int | None = None,
) -> PiecewiseSchedule | None:
    """Return the schedule of a prefill in pieces, or None if it is not compressed before its end.

    None means that it is at most `max_whole` tokens long, or ends before it exceeds its limit. With
    `--kv-reuse grid`, a prompt of at least one cell is packed cell by cell.

    Args:
        settings, num_layers, block_size, tokens, spans: as in `PieceSchedule`.
        page_tokens: tokens in a packed page; None if it holds those of an ordinary page.
    """
    interval = settings.pieces.length
    if (cell := settings.grid_cell(page_tokens)) is not None:
        interval = cell
    elif settings.pieces.max_whole is None or tokens <= settings.pieces.max_whole:
        return None
    if page_tokens is not None:
        plan = settings.page_plan(num_layers, tokens, block_size, spans, page_tokens)
        if plan is None or plan.cell is None:
            return None
        return GroupSchedule(settings=settings, page_plan=plan, interval=interval)
    pieces = PieceSchedule(
        settings=settings,
        num_layers=num_layers,
        block_size=block_size,
        tokens=tokens,
        spans=spans,
    )
    return None if pieces.first_end == tokens else pieces
