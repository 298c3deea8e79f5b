"""Prompt lengths with which the doctor can verify compression."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.planning.request import PlannedRequest
from vllm_kvcompress.settings.config import CompressionConfig

MIN_OUTPUT_TOKENS = 24
"""Minimum output tokens over which the doctor counts blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Settings and sizes that determine whether and how a prompt is compressed.

    Args:
        settings: compression settings of the request.
        layers: layers that share the page pool, L.
        block_size: tokens in a block.
        max_model_len: maximum tokens of a prompt plus its output.
        request_args: extra arguments with which a request selects `settings`; empty if they are the
            default.
        spans: protected spans of the prompt.
        page_tokens: tokens in a packed page; None if it holds the tokens of an ordinary page.
        draft_layers: layers of a draft model, which keep every token.
        draft_slots: slots that drafts may take behind the tokens of a request.
    """

    settings: CompressionConfig
    layers: int
    block_size: int
    max_model_len: int
    request_args: Mapping[str, Any] = field(default_factory=dict)
    spans: Spans = ()
    page_tokens: int | None = None
    draft_layers: int = 0
    draft_slots: int = 0

    @property
    def output_tokens(self) -> int:
        """Output tokens to request: enough to finish the look-ahead and to reach a repacking."""
        lookahead = self.settings.resolved_lookahead
        min_tokens = max(MIN_OUTPUT_TOKENS, self.settings.min_output) + lookahead
        if self.settings.decode.budget is None:
            return min_tokens
        # One interval, up to one block for alignment, and a step that reads the packed pages.
        until_repacked = self.settings.decode.interval + self.block_size + 2
        return max(min_tokens, lookahead + until_repacked)

    def request(self, tokens: int) -> PlannedRequest:
        """Return the request with a prompt of `tokens` tokens, and how the engine packs it."""
        return PlannedRequest(
            settings=self.settings,
            num_layers=self.layers,
            block_size=self.block_size,
            page_tokens=self.page_tokens,
            prompt=tokens,
            output=self.output_tokens,
            spans=self.spans,
            draft_layers=self.draft_layers,
        )

    def shortest(self, at_least: int = 0) -> int:
        """Return the shortest checked prompt length whose compression frees blocks.

        Lengths end in the middle of a block. Prefers a length at which layers keep at least a page
        each on average, if `max_model_len` allows it.

        Args:
            at_least: lower bound in tokens.

        Raises:
            ConfigError: no length up to `max_model_len` frees a block.
        """
        block, first_compressed = self.block_size, 0
        min_tokens = max(self.settings.resolved_min_prompt, 8 * block, at_least)
        max_tokens = self.max_model_len - self.output_tokens
        for tokens in range(-(-min_tokens // block) * block + block // 2, max_tokens + 1, block):
            plan = self.request(tokens).plan
            if plan is None or plan.freed_blocks <= 0:
                continue
            first_compressed = first_compressed or tokens
            if plan.pages >= self.layers:
                return tokens
        if first_compressed:
            return first_compressed
        raise ConfigError(
            f"no prompt of {min_tokens} to {max_tokens} tokens frees a block of {block} tokens with"
            f" --kv-budget {self.settings.budget} and --kv-min-prompt {self.settings.min_prompt};"
            " lower one of them, or raise --max-model-len"
        )
