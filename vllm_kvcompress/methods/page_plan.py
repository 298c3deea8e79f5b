"""How many pages and blocks a compressed prompt keeps, computed from lengths alone."""

from dataclasses import dataclass, replace

from vllm_kvcompress.methods.budget_spec import BudgetSpec
from vllm_kvcompress.methods.spans import Spans, count_before, merge_spans

_LEADING_DIVISOR = 4
"""Leading tokens take at most this part of the tokens that a budget keeps before the window."""

RECENT_TOKENS = 32
"""Minimum of the last tokens that packing in a format of its own leaves in ordinary blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """The number of pages and blocks that a compressed prompt keeps, computed from lengths alone.

    A page is one layer's share of a block. The tail, the tokens after the last full block, stays
    where it is.

    Args:
        num_layers: layers L.
        tokens: prompt length S.
        block_size: tokens in a block.
        window: observation window w.
        budget: mean tokens per layer B, window included.
        pages: pages kept over all layers, P.
        total: as in `BudgetSpec`.
        allocator_window: number of last queries whose attention sets the layers' budgets, if that
            is not the whole window; otherwise None.
        scored_by_output: whether the look-ahead is complete, so output tokens score the prompt.
        probe: for a piece, the number of probe rows at the end of `tokens`: copies of the prompt's
            first and last tokens that score the piece and are dropped afterwards. They make up the
            whole window. 0 if the piece's own tokens score it.
        spans: protected spans of the prompt.
        computed: tokens of the request computed so far, if some were dropped before; None if
            `tokens` are all of them.
        raised: whether the budget was raised so that the protected tokens fit.
        packed_page_tokens: tokens in a packed page, if its format packs more than `block_size`
            tokens into it; otherwise None. A layer's last packed page may then be partly filled.
        leading_tokens: first tokens, which stay in ordinary blocks before the packed pages, and are
            always kept (`leading_tokens`).
        cell: for a plan that packs every token in whole cells of packed pages, the tokens of a
            cell. The tokens after the last whole cell belong to the tail. None for any other plan.
        recent_tokens: minimum tokens of the tail, if packed pages have a format of their own.
        draft_layers: layers of a draft model, D, which share the target's blocks. They keep every
            token, in ordinary pages. `pages` are the same with and without them.
    """

    num_layers: int
    tokens: int
    block_size: int
    window: int
    budget: int
    pages: int
    total: int | None = None
    allocator_window: int | None = None
    scored_by_output: bool = False
    probe: int = 0
    spans: Spans = ()
    computed: int | None = None
    raised: bool = False
    packed_page_tokens: int | None = None
    leading_tokens: int = 0
    cell: int | None = None
    recent_tokens: int = 0
    draft_layers: int = 0

    def in_cells(self, cell: int) -> "PagePlan":
        """Return the plan that packs the tokens behind the first block in whole cells.

        Args:
            cell: tokens of a cell, a multiple of the tokens of a packed page.
        """
        leading = self.block_size
        plan = replace(self, cell=cell, leading_tokens=leading, window=0, raised=False)
        return replace(plan, pages=plan.num_layers * plan.full_pages)

    @property
    def page_tokens(self) -> int:
        """Return the tokens that a packed page holds."""
        return self.block_size if self.packed_page_tokens is None else self.packed_page_tokens

    @property
    def budget_spec(self) -> BudgetSpec:
        """Return the budget that an allocator divides.

        With pages of more than one token, it is what the kept pages and the tail hold, since blocks
        are filled completely.
        """
        protected = self.leading_tokens + self._protected_before(self.window)
        # The tail is kept whatever the budget.
        always_kept = self.window + protected
        budget, total = self.budget, self.total
        if self.page_tokens > 1:
            held = self.pages * self.page_tokens // self.num_layers + self.tail
            held += self.leading_tokens
            budget, total = min(held, self.tokens), None
        return BudgetSpec(
            num_layers=self.num_layers,
            tokens=self.tokens,
            window=self.window,
            budget=max(budget, always_kept),
            total=None if total is None else max(total, self.num_layers * always_kept),
            protected=protected,
        )

    @property
    def kept_after(self) -> int:
        """Return how many of the last tokens are always kept: the larger of window and tail."""
        return max(self.window, self.tail)

    @property
    def protected_in_pages(self) -> int:
        """Return the protected tokens that lie in pages.

        They are those behind the leading tokens and before the last `kept_after` tokens.
        """
        return self._protected_before(self.kept_after)

    @property
    def always_kept_spans(self) -> Spans:
        """Return the protected spans and the leading tokens."""
        if not self.leading_tokens:
            return self.spans
        return merge_spans(((0, self.leading_tokens), *self.spans))

    @property
    def intact_from(self) -> int:
        """Return the start of the request's intact end, in which no token was dropped.

        The last `kept_after` tokens of the request begin there.
        """
        computed = self.tokens - self.probe if self.computed is None else self.computed
        return computed - (self.kept_after - self.probe)

    def _protected_before(self, num_last: int) -> int:
        before = count_before(self.spans, self.intact_from + self.kept_after - num_last)
        return before - count_before(self.spans, self.leading_tokens)

    @property
    def full_blocks(self) -> int:
        """Return the number of blocks before the tail, F: full blocks, or those of whole cells."""
        computed = max(self.tokens - self.probe - self.recent_tokens, 0)
        if self.cell is None:
            return computed // self.block_size
        in_cells = max(computed - self.leading_tokens, 0) // self.cell * self.cell
        return (self.leading_tokens + in_cells) // self.block_size

    @property
    def leading_blocks(self) -> int:
        """Return the number of ordinary blocks before the packed pages."""
        return self.leading_tokens // self.block_size

    @property
    def tail(self) -> int:
        """Return the number of tokens after the full blocks, probe rows included."""
        return self.tokens - self.full_blocks * self.block_size

    @property
    def packed_end(self) -> int:
        """Return the number of the request's tokens before the first token that is not packed."""
        computed = self.tokens - self.probe if self.computed is None else self.computed
        return computed - (self.tail - self.probe)

    @property
    def full_pages(self) -> int:
        """Return the packed pages that hold all tokens before the tail of one layer."""
        return -(-self.max_tokens_in_pages // self.page_tokens)

    @property
    def max_tokens_in_pages(self) -> int:
        """Return an upper bound on the tokens that a layer keeps in its pages."""
        return self.full_blocks * self.block_size - self.leading_tokens

    @property
    def keeps_all(self) -> bool:
        """Return whether every layer keeps all tokens, so that none has to be scored."""
        return (
            self.packed_page_tokens is not None and self.pages == self.num_layers * self.full_pages
        )

    def layer_tokens(self, pages: int) -> int:
        """Return the tokens that a layer keeps with `pages` packed pages, tail included."""
        in_pages = min(pages * self.page_tokens, self.max_tokens_in_pages)
        return self.leading_tokens + in_pages + self.tail

    @property
    def floor_pages(self) -> int:
        """Return the minimum pages of a layer, m, for window and protected tokens; at least 1."""
        window, tail = self.window - self.probe, self.tail - self.probe
        return _floor_pages(window, tail, self.page_tokens, self.protected_in_pages)

    @property
    def max_layer_pages(self) -> int:
        """Return the maximum pages of one layer, however the allocator divides them."""
        return min(self.full_pages, self.pages - (self.num_layers - 1) * self.floor_pages)

    @property
    def layer_draft_pages(self) -> int:
        """Return the packed pages of each draft layer: those of all blocks that are packed."""
        return self.packed_end // self.block_size - self.leading_blocks

    @property
    def draft_pages(self) -> int:
        """Return the packed pages over all draft layers."""
        return self.draft_layers * self.layer_draft_pages if self.draft_layers else 0

    @property
    def blocks(self) -> int:
        """Return the number of vLLM blocks that hold the pages, K."""
        return -(-(self.pages + self.draft_pages) // (self.num_layers + self.draft_layers))

    @property
    def freed_blocks(self) -> int:
        """Return the blocks that packing frees."""
        return self.full_blocks - self.leading_blocks - self.blocks

    @property
    def held_blocks(self) -> int:
        """Return the blocks that the request holds after packing, its tail's included."""
        return self.leading_blocks + self.blocks - -self.tail // self.block_size


def _floor_pages(window: int, tail: int, page_tokens: int, protected: int = 0) -> int:
    # A layer that keeps only its tail may have a single token, which ruins the output.
    return max(-(-(max(window - tail, 0) + protected) // page_tokens), 1)


def leading_tokens(budget: BudgetSpec, block_size: int, page_tokens: int | None) -> int:
    """Return how many first tokens of a scored prompt stay in an ordinary block: a block's, or 0.

    They hold the attention sinks, whose keys would stretch the scales of their group in a packed
    page with a format of its own. Every layer keeps them, and they count towards the budget. An
    ordinary block takes the bytes of several times as many packed tokens. So they stay only if they
    are at most a quarter of the tokens that the budget keeps before the window:
    ``4 * block_size <= min(B, S) - w``.

    Args:
        budget: the prompt's budget.
        block_size: tokens in a block.
        page_tokens: tokens in a packed page; None if it has the format of an ordinary page.
    """
    if page_tokens is None or _LEADING_DIVISOR * block_size > min(budget.base, budget.past):
        return 0
    return block_size


def pages_kept(budget: BudgetSpec, tail: int, page_tokens: int, leading: int = 0) -> int:
    """Return the pages kept over all layers, P, for a prompt with `tail` tokens after them.

    Pages of one token hold the budget exactly. With larger pages, every block is filled. A budget
    of all tokens gets the pages that hold them all.

    Args:
        page_tokens: tokens in a packed page.
        leading: tokens in ordinary blocks before the pages.
    """
    layers, outside = budget.num_layers, leading + tail
    if budget.budget >= budget.tokens:
        return layers * -(-max(budget.tokens - outside, 0) // page_tokens)
    kept = budget.kept if page_tokens == 1 else layers * budget.budget
    floor = _floor_pages(budget.window, tail, page_tokens)
    pages = max((kept - layers * outside) // page_tokens, layers * floor)
    return pages if page_tokens == 1 else round_up_to_blocks(pages, layers)


def round_up_to_blocks(pages: int, layers: int) -> int:
    """Return `pages` rounded up to whole blocks: a block has one page per layer."""
    return -(-pages // layers) * layers


def page_plan(
    budget: BudgetSpec,
    block_size: int,
    spans: Spans = (),
    *,
    full_share: bool = False,
    share_budget: int | None = None,
    page_tokens: int | None = None,
    cell: int | None = None,
    recent_tokens: int = RECENT_TOKENS,
    leading: int | None = None,
    draft_layers: int = 0,
) -> PagePlan | None:
    """Return the plan for a prompt, or None if no block would become free.

    ``P = L * ceil(floor(L * (B - l - t) / page_tokens) / L)``, with l leading tokens: the blocks
    that the budget needs are filled. Every layer keeps at least the pages of its window, or one
    page. With pages of one token the plan holds `budget.kept` tokens exactly.

    Args:
        budget: the prompt's budget.
        block_size: tokens in a block.
        spans: protected spans of the prompt. A budget that is too small for them and other tokens
            is raised. If more than half of the prompt is protected, it stays uncompressed (None).
        full_share, share_budget: as in `raise_for_protected`.
        page_tokens: tokens in a packed page, if they are more than `block_size`. A budget of all
            tokens then frees blocks too, and drops none.
        cell: as in `PagePlan.in_cells`, for a plan that turns out to keep all tokens.
        recent_tokens: minimum of the last tokens that stay in ordinary blocks, with `page_tokens`.
        leading: first tokens that stay in an ordinary block; None for `leading_tokens`.
        draft_layers: as in `PagePlan`.
    """
    layers, tokens = budget.num_layers, budget.tokens
    recent_tokens = 0 if page_tokens is None else recent_tokens
    full_blocks = max(tokens - recent_tokens, 0) // block_size
    tail = tokens - full_blocks * block_size
    keeps_all = tokens <= budget.budget
    if full_blocks == 0 or (keeps_all and page_tokens is None):
        return None
    if tokens <= budget.window and not (keeps_all and cell):
        return None
    if mostly_protected(spans, tokens) and not keeps_all:
        return None
    if leading is None:
        leading = leading_tokens(budget, block_size, page_tokens)
    plan = PagePlan(
        num_layers=layers,
        tokens=tokens,
        block_size=block_size,
        window=budget.window,
        budget=budget.budget,
        pages=pages_kept(budget, tail, page_tokens or block_size, leading),
        total=budget.total,
        spans=spans,
        packed_page_tokens=page_tokens,
        leading_tokens=leading,
        recent_tokens=recent_tokens,
        draft_layers=draft_layers,
    )
    plan = replace(plan, pages=min(plan.pages, layers * plan.full_pages))
    plan = raise_for_protected(plan, full_share=full_share, share_budget=share_budget)
    if plan.keeps_all and cell:
        plan = plan.in_cells(cell)
        if not plan.pages:
            return None
    elif plan.pages >= layers * (full_blocks - plan.leading_blocks):
        return None
    # Draft pages may take what the dropped tokens leave.
    return None if draft_layers and plan.freed_blocks <= 0 else plan


def raise_for_protected(
    plan: PagePlan,
    max_pages: int | None = None,
    *,
    full_share: bool,
    share_budget: int | None = None,
) -> PagePlan:
    """Return the plan, with its budget raised if protected tokens leave other tokens too little.

    Other tokens always get at least the window and one page. With no more than that, protected tool
    definitions crowded out everything else, and the model chose the right tool less often than
    without protection (docs/measurements.md).

    Args:
        max_pages: upper limit on the pages over all layers; None for no limit.
        full_share: whether other tokens get their full share of the budget; if not, they get half
            the budget.
        share_budget: the budget of which other tokens get a share; None for the plan's budget.
    """
    protected = count_before(plan.spans, plan.intact_from)
    if not protected:
        return plan
    length = plan.tokens if plan.computed is None else plan.computed
    budget = plan.budget if share_budget is None else share_budget
    unprotected = -(-budget // 2)
    if full_share:
        unprotected = -(-budget * (length - protected) // length)
    outside = plan.leading_tokens + plan.tail
    min_tokens = protected + unprotected - outside
    min_pages = max(plan.floor_pages + 1, -(-min_tokens // plan.page_tokens))
    if plan.packed_page_tokens is not None:
        min_pages = min(min_pages, plan.full_pages)
    if plan.pages >= plan.num_layers * min_pages:
        return plan
    pages = plan.num_layers * min_pages
    if max_pages is not None and (pages := min(pages, max_pages)) <= plan.pages:
        return plan
    budget = pages // plan.num_layers * plan.page_tokens + outside
    return replace(plan, pages=pages, budget=budget, total=None, raised=True)


def mostly_protected(spans: Spans, tokens: int) -> bool:
    """Return whether more than half of a prompt is protected. Then it stays uncompressed."""
    return 2 * count_before(spans, tokens) > tokens
