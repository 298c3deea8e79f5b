"""How many pages and blocks a compressed prompt keeps: lengths alone decide it."""

from dataclasses import dataclass, replace

from vllm_kvcompress.methods.prompt import Prompt
from vllm_kvcompress.methods.spans import Spans, count_before


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """How many pages and blocks a compressed prompt keeps: lengths alone decide it.

    A page is one layer's share of a block. The tail, the tokens after the last full block, stays
    where it is.

    Args:
        num_layers: layers L.
        tokens: prompt length S.
        block_size: tokens in a block.
        window: observation window w.
        budget: mean tokens per layer B, window included.
        pages: pages kept over all layers, P.
        total: as in `Prompt`.
        allocator_window: last queries whose attention tells how much each layer keeps, where these
            are not all that choose its tokens; None where they are.
        by_answer: the answer's first tokens judge it, since its look-ahead is over.
        probe: of a piece, the last of its `tokens`, which judge it and are then dropped: rows of
            the prompt's first and last tokens. They are all of its window; 0 where its own tokens
            judge it.
        spans: what of the prompt is protected.
        computed: tokens of the request that are computed when it is packed, where some of them were
            dropped before; None where `tokens` are all.
        raised: the budget was raised to what is protected.
    """

    num_layers: int
    tokens: int
    block_size: int
    window: int
    budget: int
    pages: int
    total: int | None = None
    allocator_window: int | None = None
    by_answer: bool = False
    probe: int = 0
    spans: Spans = ()
    computed: int | None = None
    raised: bool = False

    @property
    def prompt(self) -> Prompt:
        """What an allocator divides: the budget, or what its pages hold where blocks are filled."""
        protected = self._protected_before(self.window)
        # what stands in the tail stays, whatever the budget
        standing = self.window + protected
        budget, total = self.budget, self.total
        if self.block_size > 1:
            budget, total = self.pages * self.block_size // self.num_layers + self.tail, None
        return Prompt(
            num_layers=self.num_layers,
            tokens=self.tokens,
            window=self.window,
            budget=max(budget, standing),
            total=None if total is None else max(total, self.num_layers * standing),
            protected=protected,
        )

    @property
    def after(self) -> int:
        """Last tokens among which nothing is chosen: those of the window, or of the tail."""
        return max(self.window, self.tail)

    @property
    def guarded(self) -> int:
        """Protected tokens before those: they lie in pages."""
        return self._protected_before(self.after)

    @property
    def settled(self) -> int:
        """Tokens of the request before those: of what lies behind them, nothing was dropped."""
        computed = self.tokens - self.probe if self.computed is None else self.computed
        return computed - (self.after - self.probe)

    def _protected_before(self, last: int) -> int:
        return count_before(self.spans, self.settled + self.after - last)

    @property
    def full_blocks(self) -> int:
        """Full blocks of the prompt, F."""
        return (self.tokens - self.probe) // self.block_size

    @property
    def tail(self) -> int:
        """Tokens after the last full block, those of the probe among them."""
        return self.tokens - self.full_blocks * self.block_size

    @property
    def floor_pages(self) -> int:
        """Pages that every layer keeps at least, m: those of its window's tokens, or one."""
        window, tail = self.window - self.probe, self.tail - self.probe
        return _floor_pages(window, tail, self.block_size, self.guarded)

    @property
    def most_pages(self) -> int:
        """Pages that a layer has at most, however they are divided."""
        return min(self.full_blocks, self.pages - (self.num_layers - 1) * self.floor_pages)

    @property
    def blocks(self) -> int:
        """vLLM blocks that hold the pages, K."""
        return -(-self.pages // self.num_layers)


def _floor_pages(window: int, tail: int, block_size: int, guarded: int = 0) -> int:
    # A layer that kept its tail alone, perhaps one token, would ruin the output.
    return max(-(-(max(window - tail, 0) + guarded) // block_size), 1)


def pages_kept(prompt: Prompt, tail: int, block_size: int) -> int:
    """Pages kept over all layers, P, where `tail` tokens lie behind them.

    Pages of one token hold the budget exactly. Longer pages fill every block that they take.
    """
    layers = prompt.num_layers
    kept = prompt.kept if block_size == 1 else layers * prompt.budget
    floor = _floor_pages(prompt.window, tail, block_size)
    pages = max((kept - layers * tail) // block_size, layers * floor)
    return pages if block_size == 1 else in_whole_blocks(pages, layers)


def in_whole_blocks(pages: int, layers: int) -> int:
    """Pages of the blocks that hold `pages`: a block has a page for each of the layers."""
    return -(-pages // layers) * layers


def page_plan(
    prompt: Prompt,
    block_size: int,
    spans: Spans = (),
    *,
    full_share: bool = False,
    own_budget: int | None = None,
) -> PagePlan | None:
    """The plan for a prompt, or None when nothing would be removed.

    ``P = L * ceil(floor(L * (B - t) / block_size) / L)``: the blocks that the budget needs are
    filled. Every layer keeps at least the pages of its window, or one. Pages of one token hold
    `prompt.kept` exactly instead.

    Args:
        spans: what of the prompt is protected. A budget that cannot hold it beside others is
            raised to that; a prompt of which more than half is protected is left whole.
        full_share, own_budget: as in `with_room_for_protected`.
    """
    layers, full, tail = prompt.num_layers, prompt.tokens // block_size, prompt.tokens % block_size
    if prompt.tokens <= prompt.budget or full == 0:
        return None
    if mostly_protected(spans, prompt.tokens):
        return None
    plan = PagePlan(
        num_layers=layers,
        tokens=prompt.tokens,
        block_size=block_size,
        window=prompt.window,
        budget=prompt.budget,
        pages=pages_kept(prompt, tail, block_size),
        total=prompt.total,
        spans=spans,
    )
    plan = with_room_for_protected(plan, full_share=full_share, own_budget=own_budget)
    return plan if plan.pages < layers * full else None


def with_room_for_protected(
    plan: PagePlan, most: int | None = None, *, full_share: bool, own_budget: int | None = None
) -> PagePlan:
    """The plan, or where its budget cannot hold what is protected beside others, one that does.

    Others are at least the window and a page. With no more, tools that were kept whole took the
    place of everything else, and the right one was named less often than without protection
    (docs/measurements.md).

    Args:
        most: pages that there are over all layers; None where these are more.
        full_share: others are as many as the budget would keep of them; else half the budget.
        own_budget: the budget that others have a share of; None for the plan's.
    """
    if not plan.guarded:
        return plan
    length = plan.tokens if plan.computed is None else plan.computed
    own = plan.budget if own_budget is None else own_budget
    others = -(-own // 2)
    if full_share:
        others = -(-own * (length - plan.guarded) // length)
    with_others = plan.guarded + others
    least = max(plan.floor_pages + 1, -(-(with_others - plan.tail) // plan.block_size))
    if plan.pages >= plan.num_layers * least:
        return plan
    pages = plan.num_layers * least
    if most is not None and (pages := min(pages, most)) <= plan.pages:
        return plan
    budget = pages // plan.num_layers * plan.block_size + plan.tail
    return replace(plan, pages=pages, budget=budget, total=None, raised=True)


def mostly_protected(spans: Spans, tokens: int) -> bool:
    """Whether more than half of a prompt is protected, so that it is left whole."""
    return 2 * count_before(spans, tokens) > tokens
