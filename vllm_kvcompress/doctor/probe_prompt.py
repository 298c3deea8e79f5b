"""How long a prompt must be for compression to be seen at work."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.planning.kv_footprint import KVFootprint
from vllm_kvcompress.planning.pieces import EveryPiece
from vllm_kvcompress.planning.schedules import EveryInterval, LookAhead
from vllm_kvcompress.settings.config import CompressionConfig

ANSWER = 24
"""Tokens of the answer during which blocks are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What decides whether a prompt is compressed.

    Args:
        settings: what compresses it.
        layers: layers that share the page pool, L.
        block_size: tokens in a block.
        longest: tokens that a prompt and its answer may have together.
        spans: what of the prompt is protected.
        asks: extra arguments by which the prompt's request asks for `settings`; none where it
            gets them anyway.
    """

    settings: CompressionConfig
    layers: int
    block_size: int
    longest: int
    asks: Mapping[str, Any] = field(default_factory=dict)
    spans: Spans = ()

    @property
    def answer(self) -> int:
        """Tokens to ask for: so many that a look-ahead ends before, or a bounded answer is packed
        again."""
        least = max(ANSWER, self.settings.min_output) + self.settings.resolved_lookahead
        if self.settings.decode_budget is None:
            return least
        # from the start of the prompt's last block to the end of one, and a step that reads it
        behind = self.settings.decode_interval + self.block_size + 2
        return max(least, self.settings.resolved_lookahead + behind)

    def plan(self, tokens: int) -> PagePlan | None:
        """What becomes of a prompt of `tokens`, with what its look-ahead adds; None when it is left
        whole."""
        plan = self.settings.page_plan(self.layers, tokens, self.block_size, self.spans)
        if plan is None or not self.settings.resolved_lookahead:
            return plan
        lookahead = LookAhead(
            settings=self.settings,
            num_layers=self.layers,
            block_size=self.block_size,
            prompt=tokens,
            last=tokens + self.answer,
            prefilled=tokens,
            spans=self.spans,
        )
        return lookahead.kept(self._nothing_packed(), lookahead.due)

    def _nothing_packed(self) -> KVFootprint:
        return KVFootprint(num_layers=self.layers, block_size=self.block_size)

    def shortest(self, at_least: int = 0) -> int:
        """The length of a prompt that is compressed and gives back blocks, with half a block over.

        Long enough that layers keep a page each on average, if `longest` allows that.

        Raises:
            ConfigError: there is none up to `longest`.
        """
        block, first_compressed = self.block_size, 0
        least = max(self.settings.min_prompt, 8 * block, at_least)
        last = self.longest - self.answer
        for tokens in range(-(-least // block) * block + block // 2, last + 1, block):
            plan = self.plan(tokens)
            if plan is None or plan.blocks >= plan.full_blocks:
                continue
            first_compressed = first_compressed or tokens
            if plan.pages >= self.layers:
                return tokens
        if first_compressed:
            return first_compressed
        raise ConfigError(
            f"no prompt of {least} to {last} tokens gives back a block of {block} with --kv-budget"
            f" {self.settings.budget} and --kv-min-prompt {self.settings.min_prompt}; lower one of"
            " them, or raise --max-model-len"
        )

    def blocks_held(self, plan: PagePlan, computed: int) -> int:
        """Blocks that a compressed request holds once `computed` of its tokens are."""
        if computed < plan.tokens:
            footprint = self._in_pieces(plan.tokens - self.settings.resolved_lookahead, computed)
        else:
            footprint, _ = self._after(plan, computed)
        ordinary = -(-computed // self.block_size) - footprint.first_block
        return -(-footprint.pages // self.layers) + ordinary

    def _in_pieces(self, prompt: int, computed: int) -> KVFootprint:
        """What is held of `computed` tokens before a prompt's end is packed.

        A look-ahead leaves that end whole, and not the pieces before it.
        """
        footprint, settings = self._nothing_packed(), self.settings
        if settings.max_whole is None or prompt <= settings.max_whole:
            return footprint
        pieces = EveryPiece(
            settings=settings,
            num_layers=self.layers,
            block_size=self.block_size,
            tokens=prompt,
            packs_end=False,
            spans=self.spans,
        )
        for tokens in range(settings.piece, min(computed, prompt) + 1, settings.piece):
            plan = pieces.plan(footprint, tokens)
            if plan is not None:
                footprint.pack(plan, tokens // self.block_size)
        return footprint

    def times_repacked(self, plan: PagePlan) -> int:
        """How often the answer is packed again."""
        return self._after(plan, plan.tokens + self.answer)[1]

    def _after(self, plan: PagePlan, computed: int) -> tuple[KVFootprint, int]:
        """What is held once `computed` tokens are, and how often the answer was packed by then."""
        footprint, times = self._nothing_packed(), 0
        footprint.pack(plan, plan.full_blocks)
        if self.settings.decode_budget is None:
            return footprint, 0
        prompt = plan.tokens - self.settings.resolved_lookahead
        last = prompt + self.answer
        answer = EveryInterval(
            settings=self.settings, prefilled=prompt, last=last, spans=self.spans
        )
        for blocks in range(plan.full_blocks + 1, computed // self.block_size + 1):
            again = answer.plan(footprint, blocks * self.block_size)
            if again is not None:
                footprint.pack(again, blocks, freeze=True)
                times += 1
        return footprint, times
