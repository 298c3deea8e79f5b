"""When a request is packed, and to how many pages: from lengths alone.

A request has one holding, and up to three schedules one after the other: of its prefill, `AtEnd` or
`EveryPiece`, of a prompt that its answer's first tokens judge, `LookAhead`, and of its answer,
`EveryInterval`. Each is asked the same: is the request packed after the step that ends with so many
tokens computed, and how?
"""

from dataclasses import dataclass, replace

from vllm_kvcompress.methods.page_plan import (
    PagePlan,
    in_whole_blocks,
    page_plan,
    pages_kept,
    with_room_for_protected,
)
from vllm_kvcompress.methods.presets import least_window
from vllm_kvcompress.methods.spans import Spans, count_before
from vllm_kvcompress.planning.holding import Holding
from vllm_kvcompress.planning.pieces import EveryPiece
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import lookahead_window, method_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AtEnd:
    """A prompt that stands whole until its prefill ends.

    Args:
        settings: what packs it.
        whole: how much of it is kept.
    """

    settings: CompressionConfig
    whole: PagePlan

    def plan(self, holding: Holding, tokens: int) -> PagePlan | None:
        """How a step that ends with `tokens` computed is followed by packing; None if it is not."""
        return self.whole if tokens >= self.whole.tokens else None

    @property
    def most_blocks(self) -> int:
        """Blocks that the prompt holds at most until its end is packed, in its own blocks."""
        return -(-self.whole.tokens // self.whole.block_size)

    @property
    def ending(self) -> int:
        """Blocks that the prompt holds when its prefill ends, in its own blocks."""
        return self.most_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAhead:
    """A prompt that stands as its prefill left it until the first tokens of its answer judge it.

    The answer's tokens so far are kept beside what the budget keeps of the prompt: from then on as
    much is held as if the prompt had been packed when its prefill ended.

    Args:
        settings: what packs it.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        prompt: tokens of the prompt, S.
        last: tokens of its longest answer and its prompt.
        prefilled: tokens when its prefill ends, those of an answer that was preempted included.
        cached: tokens that its prefill found in the prefix cache: of these nobody has the queries.
        spans: what of the prompt is protected.
    """

    settings: CompressionConfig
    num_layers: int
    block_size: int
    prompt: int
    last: int
    prefilled: int
    cached: int = 0
    spans: Spans = ()

    @property
    def due(self) -> int:
        """Tokens that are computed when it is packed."""
        return self.prompt + self.settings.resolved_lookahead

    def answered(self, tokens: int) -> int:
        """Tokens of the answer that are computed once `tokens` of the request are."""
        return tokens - self.prompt

    @property
    def longest_hit(self) -> int:
        """Tokens that may come from the prefix cache.

        At its prefill's end as many queries are there as the method needs, and when it is due all.
        """
        least = max(least_window(method_of(self.settings).reads), 1)
        return min(self.prefilled - least, self.due - lookahead_window(self.settings))

    def next_end(self, computed: int) -> int | None:
        """Where a step must end at the latest that starts behind `computed` tokens; None: anywhere.

        What is computed after it is due reads what was packed, so no draft may be. How many drafts
        are taken is not known before a step ends: so the last one before has none.
        """
        return max(self.due - 1, computed + 1) if computed < self.due else None

    def begins(self, tokens: int) -> bool:
        """Whether a chunk that ends with `tokens` computed leaves queries that may judge."""
        return tokens > self.prefilled - lookahead_window(self.settings)

    def window(self, tokens: int) -> int:
        """Queries that judge once `tokens` are computed: the last w, or all where there are fewer.

        When it is due, there are w. Before, a method that has so many of the prompt beside the
        answer's has no more of them.
        """
        window = lookahead_window(self.settings)
        if self.settings.parts.prompt_window:
            window -= max(self.due - tokens, 0)
        return min(window, tokens - self.cached)

    def plan(self, holding: Holding, tokens: int) -> PagePlan | None:
        """How a step that ends with `tokens` computed is followed by packing; None if it is not.

        The step's own token is the next after `tokens`: another step must read what is packed.
        """
        if tokens < self.due or tokens + 1 >= self.last:
            return None
        return self.kept(holding, tokens)

    def kept(self, holding: Holding, tokens: int, *, least: int = 0) -> PagePlan | None:
        """What is kept if it is packed once `tokens` are computed, at any time after the prefill.

        None if that is everything, or if the method cannot judge by so few queries (`window`).

        Args:
            least: tokens of the prompt that a layer keeps on average where its budget is smaller.
        """
        window = self.window(tokens)
        if self.spans:
            # what was packed before and is protected must lie before it
            window = min(window, tokens - holding.settled)
        if window < least_window(method_of(self.settings).reads):
            return None
        layers, size, answered = self.num_layers, self.block_size, self.answered(tokens)
        full_share = self.settings.full_share
        own = self.settings.prompt(layers, self.prompt)
        total = None if own.total is None else max(own.total, layers * least)
        prompt = replace(
            own,
            tokens=tokens,
            window=window,
            budget=max(own.budget, least) + answered,
            total=None if total is None else total + layers * answered,
        )
        if not holding.pages:
            plan = page_plan(
                *(prompt, size, self.spans), full_share=full_share, own_budget=own.budget + answered
            )
        else:
            blocks, tail = divmod(tokens, size)
            plan = PagePlan(
                num_layers=layers,
                tokens=holding.most_tokens(blocks * size) + tail,
                block_size=size,
                window=prompt.window,
                budget=prompt.budget,
                pages=min(pages_kept(prompt, tail, size), holding.pages_at(blocks)),
                total=prompt.total,
                spans=self.spans,
                computed=tokens,
            )
            plan = with_room_for_protected(
                *(plan, holding.pages_at(blocks)),
                full_share=full_share,
                own_budget=own.budget + answered,
            )
        if plan is None:
            return None
        by_answer = answered > 0 and tokens >= self.due
        # The prompt's last queries, mostly the template's, spoil how much each layer is given.
        alone = by_answer and answered < window
        return replace(plan, by_answer=by_answer, allocator_window=answered if alone else None)

    def half(self, holding: Holding, tokens: int) -> PagePlan | None:
        """What is kept of a prompt that is packed early, and again later: half of it.

        None where it may keep as much anyway, or was packed before.
        """
        return None if holding.pages else self.kept(holding, tokens, least=self.prompt // 2)

    def held_blocks(self, ending: int) -> int:
        """Blocks that the prompt and its answer hold when they are packed, in their own blocks.

        Args:
            ending: blocks that the prompt holds when its prefill ends.
        """
        return ending + -(-self.due // self.block_size) + self.prefilled // -self.block_size


@dataclass(slots=True, kw_only=True)
class EveryInterval:
    """An answer whose memory is bounded while it is written.

    Args:
        settings: what packs it, with `decode_budget`.
        prefilled: tokens when its prefill ended; later ones leave their queries.
        last: tokens of its longest answer and its prompt.
        added_up: tokens whose attention the workers have added up, for a method that ranks by the
            sum of all rows; None for one that does not.
        spans: what of the prompt is protected.
    """

    settings: CompressionConfig
    prefilled: int
    last: int
    added_up: int | None = None
    spans: Spans = ()

    def cap(self, holding: Holding) -> int:
        """Pages that are held over all layers once the answer was packed again, P."""
        budget, size = self.settings.decode_budget, holding.block_size
        assert budget is not None
        layers, protected = holding.num_layers, count_before(self.spans, self.prefilled)
        # every layer needs the pages of its window and of what is protected, or one
        floor = max(-(-(self.settings.resolved_decode_window + protected) // size), 1)
        own = layers * budget // size
        more = int(protected > 0 and own < layers * floor)
        if size > 1:
            own = in_whole_blocks(own, layers)
        return max(holding.pages, own, layers * (floor + more))

    def plan(self, holding: Holding, tokens: int) -> PagePlan | None:
        """How a step that ends with `tokens` computed is followed by packing; None if it is not.

        It must fill a block, be `decode_interval` tokens after the last time and a window after
        the prefill, leave something to read it, and hold more than it may.
        """
        size, settings, layers = holding.block_size, self.settings, holding.num_layers
        blocks, rest = divmod(tokens, size)
        window = settings.resolved_decode_window
        if rest or (blocks - holding.first_block) * size < settings.decode_interval:
            return None
        # The step's own token is the next after `tokens`: another step must read what is packed.
        if tokens - self.prefilled < window or tokens + 1 >= self.last:
            return None
        cap = self.cap(holding)
        if holding.pages_at(blocks) <= cap:
            return None
        return PagePlan(
            num_layers=layers,
            tokens=holding.most_tokens(tokens),
            block_size=size,
            window=window,
            budget=max(cap * size // layers, window + 1),
            pages=cap,
            total=cap * size,
            spans=self.spans,
            computed=tokens,
        )

    def may_pack(self, holding: Holding) -> bool:
        """Whether its longest answer holds more than it may, at a step that another one follows."""
        size, settings = holding.block_size, self.settings
        end = (self.last - 2) // size
        if (end - holding.first_block) * size < settings.decode_interval:
            return False
        if end * size - self.prefilled < max(settings.resolved_decode_window, 1):
            return False
        return holding.pages_at(end) > self.cap(holding)

    def add_up(self, tokens: int, block_size: int, *, packs: bool) -> int:
        """Queries whose attention is added up after a step that ends with `tokens` computed.

        They count as added up from then on.

        Args:
            packs: it is packed after that step: what is dropped must have been judged by all.
        """
        if self.added_up is None:
            return 0
        latest = tokens - self.added_up
        # Queries are kept for an interval, and what blocks hold is added up when they are full.
        full = tokens % block_size == 0
        if packs or (full and latest + block_size > self.settings.decode_interval):
            self.added_up = tokens
            return latest
        return 0

    def most_blocks(self, holding: Holding, *, packed: int, tokens: int) -> int:
        """Blocks that the request holds at most until `tokens` of it are in the cache.

        Args:
            holding: of the request when its prefill has ended; it stays as it is.
            packed: blocks that its prompt was packed into, 0 without.
        """
        size, most, holding = holding.block_size, 0, replace(holding)
        for blocks in range(self.prefilled // size, tokens // size + 1):
            most = max(most, packed + blocks - holding.first_block)
            later = blocks * size > self.prefilled
            plan = self.plan(holding, blocks * size) if later else None
            if plan is not None:
                packed = plan.blocks
                holding.pack(plan, blocks, freeze=True)
        return max(most, packed + -(-tokens // size) - holding.first_block)


@dataclass(slots=True, kw_only=True)
class RequestSchedule:
    """One request's holding, and what packs it.

    Args:
        prefill: until its prefill ends; None where nothing is packed by then.
        lookahead: from then on until it has packed the prompt; None where nothing waits for it.
        answer: from then on; None where the answer is not bounded.
        prefilled: whether the prefill has ended.
    """

    holding: Holding
    prefill: AtEnd | EveryPiece | None
    lookahead: LookAhead | None = None
    answer: EveryInterval | None = None
    prefilled: bool = False

    def plan(self, tokens: int) -> PagePlan | None:
        """How a step that ends with `tokens` computed is followed by packing; None if it is not."""
        schedule = (self.lookahead or self.answer) if self.prefilled else self.prefill
        return None if schedule is None else schedule.plan(self.holding, tokens)
