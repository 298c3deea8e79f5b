"""Find the protected token spans of a prompt, and check that they fit the budget."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig

from vllm_kvcompress.engine.frontend.protection.chat_parts import (
    PartError,
    needed_parts,
    parts_of,
)
from vllm_kvcompress.engine.layers import layers_per_stage
from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.methods.spans import MAX_SPANS, Spans, count_before, merge_spans, parse_spans
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.schedules.pieces import PieceSchedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.packed_dtype import K4V3
from vllm_kvcompress.settings.protection import NONE, PROTECT, Protection
from vllm_kvcompress.settings.request_options import RequestOptions


def protected_spans(
    config: VllmConfig,
    settings: CompressionConfig,
    options: RequestOptions,
    prompt: Any,
    max_tokens: int | None,
) -> Spans:
    """Return the protected spans of a prompt; () if it stays uncompressed.

    Args:
        config: configuration of the engine.
        settings: settings of the engine.
        options: options of the request.
        prompt: prompt as it goes to the engine.
        max_tokens: maximum length of the output; None without a limit.

    Raises:
        OverrideError: a protected part cannot be found, or too much is protected.
    """
    protection = options.protection
    if options.settings is None or not protection:
        return ()
    fields = prompt if isinstance(prompt, Mapping) else {}
    ids, embeds = fields.get("prompt_token_ids"), fields.get("prompt_embeds")
    if ids is None:
        uncompressed = embeds is not None and options.stays_uncompressed(len(embeds), max_tokens)
        if not uncompressed and (
            protection.spans or protection.named or needed_parts.get() is not None
        ):
            raise OverrideError.invalid(
                f"{PROTECT} needs the token ids of the prompt, and this prompt has none; send text"
                f" or token ids, or set {PROTECT} to {NONE}",
            )
        return ()
    try:
        spans = parse_spans(protection.spans, len(ids))
    except ConfigError as e:
        raise OverrideError.invalid(f"{PROTECT}: {e}") from None
    if options.stays_uncompressed(len(ids), max_tokens):
        return ()
    granted = merge_spans(_part_spans(protection.granted, protection, settings, prompt))
    added_words = tuple(word for word in protection.words if word not in protection.granted)
    spans = merge_spans([*granted, *_part_spans(added_words, protection, settings, prompt), *spans])
    if len(spans) > MAX_SPANS:
        raise OverrideError.out_of_bounds(
            f"{PROTECT} must be at most {MAX_SPANS} separate spans, got {len(spans)}",
        )
    if spans:
        limits = _Limits(
            config=config, settings=settings, request_settings=options.settings, tokens=len(ids)
        )
        limits.check(spans, granted)
    return spans


def _part_spans(
    words: tuple[str, ...], protection: Protection, settings: CompressionConfig, prompt: Any
) -> list[tuple[int, int]]:
    """Return the spans of parts of a chat.

    A prompt that is not a chat has no parts, so the operator's words do not apply to it.

    Raises:
        OverrideError: a part cannot be found.
    """
    parts, found = parts_of(prompt), list[tuple[int, int]]()
    for word in words:
        if parts is None:
            if needed_parts.get() is None and word not in protection.named:
                continue
            problem = "this request is not a chat"
        else:
            try:
                found += parts.spans(word)
                continue
            except PartError as e:
                problem = str(e)
        fix = f"give its tokens, such as {PROTECT}=0:200, or remove {word}"
        if word in protection.granted and not settings.allow_override:
            fix = f"ask the operator to remove {word} from --kv-protect, or for overrides"
        raise OverrideError.invalid(
            f"{PROTECT}: {word} cannot be found in the prompt, because {problem}; {fix}",
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """Limits of the protected tokens of one prompt.

    The operator's words raise the budget as far as needed. A request's own spans raise it up to
    the largest budget that the request could have named.

    Args:
        config: configuration of the engine.
        settings: settings of the engine.
        request_settings: settings of the request.
        tokens: prompt length.
    """

    config: VllmConfig
    settings: CompressionConfig
    request_settings: CompressionConfig
    tokens: int

    def check(self, spans: Spans, granted: Spans) -> None:
        """Check that the spans fit a budget that the request may have, and fit between pieces.

        Args:
            spans: all protected spans.
            granted: those of `spans` that the operator protects.

        Raises:
            OverrideError: too much is protected.
        """
        protected = count_before(spans, self.tokens)
        self._check_between_pieces(spans, protected)
        if spans == granted:
            return
        # `protect=()` limits protected tokens to half of the budget. This limit applies to spans
        # that the request adds, even if the operator protects parts too.
        by_request = self.request_settings.with_values(protect=())
        needed = self._needed(by_request, spans)
        allowed = max(self._max_budget, self._needed(self.request_settings, granted))
        if needed > allowed:
            raise OverrideError.out_of_bounds(
                f"{PROTECT}: {protected} tokens need a budget of {needed} tokens per layer, and"
                f" this request may have {allowed}; protect less, or set a larger kv_budget",
            )
        if self.request_settings.decode.budget is None:
            return
        needed = self._decode_budget_for(spans)
        allowed = max(self.request_settings.decode.budget, self._decode_budget_for(granted))
        if needed > allowed:
            raise OverrideError.out_of_bounds(
                f"{PROTECT}: {protected} tokens need a decode budget of {needed} tokens per layer,"
                f" and this request may have {allowed}; protect less",
            )

    def _check_between_pieces(self, spans: Spans, protected: int) -> None:
        """Raise OverrideError if a prompt in pieces would have to keep too many protected tokens.

        The prompt length does not matter: after a preemption, the output is recomputed with
        the prompt.
        """
        request_settings, size = self.request_settings, self._block_size
        if (
            request_settings.pieces.max_whole is None
            or request_settings.resolved_packed_dtype == K4V3
        ):
            # In k4v3, a prompt in pieces keeps every token.
            return
        pieces = PieceSchedule(
            settings=request_settings,
            num_layers=self._layers,
            block_size=size,
            tokens=max(self.tokens, request_settings.pieces.max_whole + 1),
            spans=spans,
        )
        if pieces.protection_too_large:
            kept = pieces.unprotected_held_pages // self._layers * size
            raise OverrideError.out_of_bounds(
                f"{PROTECT}: {protected} tokens are protected, and every layer keeps {kept} tokens"
                " between the pieces of a prompt; protect less, or ask the operator for a larger"
                " --kv-max-whole",
            )

    def _needed(self, request_settings: CompressionConfig, spans: Spans) -> int:
        """Return the budget, in tokens per layer, that the request needs to protect these spans."""
        size = self._block_size
        itemsize = self.config.model_config.dtype.itemsize
        page_tokens = packed_page_tokens(request_settings, size, itemsize)
        plan = request_settings.page_plan(self._layers, self.tokens, size, spans, page_tokens)
        if plan is not None:
            return plan.budget if plan.raised else request_settings.tokens_per_layer(self.tokens)
        # Without spans it would be compressed, so the spans need the whole prompt.
        unprotected = request_settings.page_plan(self._layers, self.tokens, size, (), page_tokens)
        return (
            request_settings.tokens_per_layer(self.tokens) if unprotected is None else self.tokens
        )

    def _decode_budget_for(self, spans: Spans) -> int:
        """Return the decode budget for these spans and the decode window; 0 without spans."""
        protected, size = count_before(spans, self.tokens), self._block_size
        window = self.request_settings.resolved_decode_window
        return -(-(window + protected) // size) * size if protected else 0

    @property
    def _max_budget(self) -> int:
        """Return the largest budget, in tokens per layer, that the request has or may name."""
        budget, settings = self.request_settings.tokens_per_layer(self.tokens), self.settings
        if not settings.allow_override:
            return budget
        if not settings.budget_bounds:
            return max(budget, self.tokens)
        budgets = [budget]
        for _, high in settings.budget_bounds:
            # A bound below the method's window cannot be chosen for this method.
            with suppress(ConfigError):
                named = settings.variant(self.request_settings.compress, high)
                budgets.append(named.tokens_per_layer(self.tokens))
        return max(budgets)

    @property
    def _layers(self) -> int:
        return layers_per_stage(self.config)

    @property
    def _block_size(self) -> int:
        return int(self.config.cache_config.block_size)
