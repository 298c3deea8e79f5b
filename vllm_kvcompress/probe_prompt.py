"""How long a prompt must be for compression to be seen at work."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.plan import PagePlan

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
        asks: extra arguments by which the prompt's request asks for `settings`; none where it
            gets them anyway.
    """

    settings: CompressionConfig
    layers: int
    block_size: int
    longest: int
    asks: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> int:
        """Tokens to ask for."""
        return max(ANSWER, self.settings.min_output)

    def plan(self, tokens: int) -> PagePlan | None:
        """What becomes of a prompt of `tokens`; None when it is left whole."""
        return self.settings.page_plan(self.layers, tokens, self.block_size)

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
        return plan.blocks + -(-computed // self.block_size) - plan.full_blocks
